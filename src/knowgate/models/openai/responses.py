"""Parse the responses of an OpenAI-compatible server; malformed responses raise ModelError.

Chat responses list tokens under logprobs.content. Responses to raw prompts list them in parallel arrays, except on
llama.cpp, which uses the chat format for both. Servers list only the most probable tokens of each position, so the
entropy is None unless they list thousands.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from knowgate.errors import ModelError, ServerError
from knowgate.models.openai.client import STREAM_END
from knowgate.types import Completion, Token

LOGPROB_TOLERANCE = 1e-3  # servers with half precision may return log-probabilities this far above 0
MIN_LOGPROB = -9999.0  # vLLM writes this for probability 0, llama.cpp the lowest float
MAX_TOKEN_COUNT = 2**31
MIN_TOKENS_FOR_ENTROPY = 1_000  # minimum number of listed tokens to estimate an entropy from
LARGE_VOCABULARY = 150_000  # assumed vocabulary size in the upper bound of the entropy
NEGLIGIBLE_MASS = 1e-9  # probability of all unlisted tokens that is treated as 0
NOT_OPENAI_HINT = "The server is not an OpenAI-compatible API. Check the URL, which usually ends in /v1."
REASONING_FIELDS = ("reasoning_content", "reasoning")  # names of the thoughts before an answer, on different servers
SPECIAL_TOKEN_AT_END = re.compile(rb"<[^<>\s]{1,40}>\Z")
ASCII_SPACES = " \t\r\n\v\f"
MAX_SPECIAL_TOKENS = 4  # after an answer
TopTokens = tuple[tuple[str, float], ...]  # texts and log-probabilities, most probable first


@dataclass(frozen=True)
class TokenLogprobs:
    """A token of a response, its log-probability, and the most probable tokens at its position (`top`)."""

    text: str
    logprob: float
    top: TopTokens

    @property
    def entropy(self) -> float | None:
        """Estimated entropy in nats, or None if too few tokens are listed.

        The tokens that are not listed add an amount between two bounds. The mean of both bounds is used.
        """
        if len(self.top) < MIN_TOKENS_FOR_ENTROPY:
            return None
        logprobs = np.array([logprob for _, logprob in self.top])
        entropy = -float((np.exp(logprobs) * logprobs).sum())
        p_unlisted = max(0.0, 1 - float(np.exp(logprobs).sum()))
        if p_unlisted > NEGLIGIBLE_MASS:
            min_surprisal = -logprobs[-1]  # no unlisted token is more probable than the last listed one
            max_surprisal = math.log(LARGE_VOCABULARY / p_unlisted)  # if all unlisted tokens are equally probable
            entropy += p_unlisted * (min_surprisal + max_surprisal) / 2
        return entropy

    @property
    def margin(self) -> float | None:
        """Probability of the most probable token minus that of the second, or None if fewer than two are listed."""
        return None if len(self.top) < 2 else math.exp(self.top[0][1]) - math.exp(self.top[1][1])

    def as_token(self) -> Token:
        """Return the statistics of the token, without its alternatives."""
        return Token(self.text, self.logprob, self.entropy, self.margin)


# --- whole responses ------------------------------------------------------------------------------


def parse_completions(response: Any) -> list[Completion]:
    """Return the completions in a response, in the order in which the server lists them."""
    choices = _get_choices(response)
    counts = _split_token_count(response, len(choices))
    return [_parse_completion(choice, count) for choice, count in zip(choices, counts, strict=True)]


def parse_token_logprobs(response: Any) -> list[TokenLogprobs] | None:
    """Return the tokens of the first completion with their log-probabilities, or None if there are none."""
    return parse_logprobs(get_first_choice(response).get("logprobs"))


def get_first_choice(response: Any) -> dict[str, Any]:
    """Return the first of the response's `choices` (completions) as JSON."""
    return _get_choices(response)[0]


def has_tool_call(response: Any) -> bool:
    """Return whether the first completion of a response calls a tool."""
    message = get_first_choice(response).get("message")
    return isinstance(message, dict) and bool(message.get("tool_calls"))


def parse_answer_ids(response: Any) -> list[int]:
    """Return the token ids of the first completion, without the token that ended it."""
    choice = get_first_choice(response)
    ids = choice.get("token_ids", choice.get("response_token_ids"))
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ModelError("the server did not return the token ids of its answer. Use a newer release of the server.")
    if choice.get("finish_reason") != "stop" or not ids:
        return ids
    # What ended the answer: a stop token, a stop text (which is not among the tokens), or None for vLLM's usual stop token.
    stop = choice.get("matched_stop", choice.get("stop_reason"))
    ends_in_stop_token = stop is None or stop == ids[-1]
    return ids[:-1] if ends_in_stop_token else ids


def join_completions(draft: Completion, continuation: Completion) -> Completion:
    """Join a draft and its continuation."""
    tokens = None
    if draft.tokens is not None and continuation.tokens is not None:
        tokens = draft.tokens + continuation.tokens
    n_tokens = draft.n_tokens + continuation.n_tokens
    return Completion(draft.text + continuation.text, tokens, continuation.finished, n_tokens)


def _get_choices(response: Any) -> list[dict[str, Any]]:
    """Return the `choices` (completions) of a response as JSON."""
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not choices or not all(isinstance(item, dict) for item in choices):
        raise ModelError(f"the server's response has no field 'choices'. {NOT_OPENAI_HINT}")
    return choices


def _parse_completion(choice: Mapping[str, Any], n_tokens: int) -> Completion:
    """Convert a choice to a completion.

    `n_tokens` is used if there are no log-probabilities to count, or only those of the answer after the reasoning.
    """
    answer_choice = drop_reasoning_logprobs(choice)
    logprobs = parse_logprobs(answer_choice.get("logprobs"))
    tokens = None if logprobs is None else tuple(item.as_token() for item in logprobs)
    if tokens is not None:
        n_tokens = max(n_tokens, len(tokens)) if answer_choice is not choice else len(tokens)
    message = choice.get("message")
    has_text = isinstance(message, dict) or "text" in choice
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    if not has_text or not isinstance(text, str | None):
        raise ModelError(f"the server's response has no answer text. {NOT_OPENAI_HINT}")
    return Completion(
        text=text or "",  # null means that nothing was generated
        tokens=tokens,
        finished=choice.get("finish_reason") != "length",
        n_tokens=n_tokens,
    )


def _split_token_count(response: dict[str, Any], n: int) -> list[int]:
    """Split the token count of a response evenly over its `n` completions.

    Servers report only the sum.
    """
    usage = response.get("usage")
    total = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not isinstance(total, int) or not 0 <= total < MAX_TOKEN_COUNT:
        return [0] * n
    share, remainder = divmod(total, n)
    return [share + 1 if i < remainder else share for i in range(n)]


# --- log-probabilities ----------------------------------------------------------------------------


def parse_logprobs(logprobs: Any) -> list[TokenLogprobs] | None:
    """Parse the field `logprobs` of a response, or return None.

    Chat and completions formats are supported.
    """
    if not isinstance(logprobs, dict):
        return None
    with translate_format_errors("log-probabilities"):
        if isinstance(logprobs.get("content"), list):
            return [_parse_chat_token(item) for item in logprobs["content"]]
        if isinstance(logprobs.get("token_logprobs"), list):
            return _parse_parallel_arrays(logprobs)
    return None


def drop_reasoning_logprobs(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a choice of a chat without its reasoning and the log-probabilities of the reasoning. Others stay unchanged.

    Some servers list the tokens of the reasoning before those of the answer. If the listed tokens do not end in the answer,
    there are no log-probabilities in the result.
    """
    message, logprobs = choice.get("message"), choice.get("logprobs")
    if not isinstance(message, dict) or not isinstance(logprobs, dict) or not _has_reasoning(message):
        return choice
    items, answer = logprobs.get("content"), message.get("content")
    answer_items: list[Any] | None = None
    if isinstance(items, list) and isinstance(answer, str):
        answer_items = _find_answer_items(items, answer.strip(ASCII_SPACES))
    kept_message = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    return {**choice, "message": kept_message, "logprobs": answer_items and {**logprobs, "content": answer_items}}


def _find_answer_items(items: list[Any], answer: str) -> list[Any] | None:
    """Return the log-probabilities of the tokens that spell an answer at the end, or None if they do not."""
    with translate_format_errors("log-probabilities"):
        pieces = [_get_bytes(item) for item in items]
    all_bytes, answer_bytes = b"".join(pieces).rstrip(), answer.encode(errors="replace")
    for _ in range(MAX_SPECIAL_TOKENS):
        if not all_bytes.endswith(answer_bytes):
            all_bytes = SPECIAL_TOKEN_AT_END.sub(b"", all_bytes).rstrip()
    if not answer_bytes or not all_bytes.endswith(answer_bytes):
        return None
    start = len(all_bytes) - len(answer_bytes)
    return [item for item, end in zip(items, accumulate(map(len, pieces)), strict=True) if end > start]


def _get_bytes(item: dict[str, Any]) -> bytes:
    """Return the UTF-8 text of a listed token. A character can be split into several tokens."""
    values = item.get("bytes")
    return bytes(values) if isinstance(values, list) else str(item["token"]).encode(errors="replace")


def _has_reasoning(message: dict[str, Any]) -> bool:
    """Return whether a message, or a piece of one, has reasoning, which comes before the answer."""
    return any(message.get(name) for name in REASONING_FIELDS)


def _parse_chat_token(item: dict[str, Any]) -> TokenLogprobs:
    top = [(other["token"], other["logprob"]) for other in item.get("top_logprobs") or ()]
    return TokenLogprobs(str(item["token"]), check_logprob(item["logprob"]), _parse_top(top))


def _parse_parallel_arrays(logprobs: dict[str, Any]) -> list[TokenLogprobs]:
    """Parse the log-probabilities of a response to a raw prompt.

    They are in parallel arrays.
    """
    texts = logprobs["tokens"]
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    return [
        TokenLogprobs(str(text), check_logprob(value), _parse_top((top or {}).items()))
        for text, value, top in zip(texts, logprobs["token_logprobs"], tops, strict=True)
    ]


def _parse_top(pairs: Iterable[tuple[Any, Any]]) -> TopTokens:
    checked = ((str(text), check_logprob(value)) for text, value in pairs)
    return tuple(sorted(checked, key=lambda pair: -pair[1]))


def check_logprob(value: Any) -> float:
    """Check a log-probability from a server and limit it to [MIN_LOGPROB, 0].

    Raises:
        ModelError: The value is NaN, infinite or clearly above 0.
    """
    number = float(value)
    if math.isnan(number):
        raise ModelError("the server returned NaN as a log-probability. Check the server's weights and dtype.")
    if math.isinf(number) or number > LOGPROB_TOLERANCE:
        raise ModelError(f"the server returned {number}, which is not a valid log-probability. Update the server.")
    return min(0.0, max(MIN_LOGPROB, number))


@contextlib.contextmanager
def translate_format_errors(what: str) -> Generator[None, None, None]:
    """Raise ModelError if the block fails on an unexpected response format.

    `what` names the bad part in the message.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
        raise ModelError(f"the server's response has {what} in an unknown format. Update the server.") from None


def compute_label_logprobs(top: TopTokens, labels: Sequence[str]) -> list[float]:
    """Return the log-probability of each label from the tokens listed by a server.

    Labels that are not listed get an upper bound.

    Args:
        top: The listed tokens with their log-probabilities.
        labels: The labels.
    """
    logprobs = []
    for label in labels:
        spellings = [value for text, value in top if text.strip() == label.strip()]
        logprobs.append(_log_sum_exp(spellings) if spellings else _bound_logprob(top, label))
    return logprobs


def is_label_missing(top: TopTokens, labels: Sequence[str]) -> bool:
    """Return whether any label is not among the listed tokens."""
    listed = {text.strip() for text, _ in top}
    return any(label.strip() not in listed for label in labels)


def _bound_logprob(top: TopTokens, label: str) -> float:
    """Return an upper bound for the log-probability of a label that is not among the listed tokens `top`.

    Either the label is a token that is less probable than all listed ones, or it begins with a listed token.
    """
    beginnings = [value for text, value in top if text.strip() and label.strip().startswith(text.strip())]
    lowest = min(value for _, value in top)
    return max(lowest, _log_sum_exp(beginnings)) if beginnings else lowest


def _log_sum_exp(values: Sequence[float]) -> float:
    """Return the log of the summed probabilities, at most 0 in spite of rounding."""
    return min(0.0, float(np.logaddexp.reduce(values)))


# --- streams --------------------------------------------------------------------------------------


def assemble_stream(chunks: Generator[Any, None, None]) -> Generator[str, None, dict[str, Any]]:
    """Yield the text of each chunk of a stream, then return the whole response as JSON."""
    response = StreamedResponse()
    with contextlib.closing(chunks):
        for chunk in chunks:
            if text := response.add(chunk):
                yield text
    return response.build()


@dataclass
class StreamedResponse:
    """Assembles the first completion of a streamed response from its chunks.

    Args:
        texts: Text of each chunk so far.
        finish_reason: Why the server ended the answer, such as 'stop' or 'length'; None if it did not say.
        logprobs: Lists of log-probabilities so far, by their field names in the response.
        usage: Token counts; None if the server did not send them.
        ended: Whether the server sent STREAM_END.
    """

    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    usage: Any = None
    ended: bool = False

    def add(self, chunk: Any) -> str:
        """Add a chunk and return its text, or '' for a chunk without text.

        Raises:
            ModelError: The chunk does not have the format of OpenAI's API.
        """
        if chunk == STREAM_END:
            self.ended = True
            return ""
        if not isinstance(chunk, dict):
            raise ModelError(f"the server's stream has a chunk that is not a JSON object. {NOT_OPENAI_HINT}")
        self.usage = chunk.get("usage") or self.usage
        choice = _find_first_choice(chunk)
        if choice is None:
            return ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        text = _get_chunk_text(choice)
        if not is_thought(chunk):  # its probability does not tell whether the LLM knows the answer
            self._add_logprobs(choice.get("logprobs"))
        self.texts.append(text)
        return text

    def _add_logprobs(self, logprobs: Any) -> None:
        """Append the log-probabilities of a chunk to those of earlier chunks."""
        if isinstance(logprobs, dict):
            for name, values in logprobs.items():
                if isinstance(values, list):
                    self.logprobs.setdefault(name, []).extend(values)

    def build(self) -> dict[str, Any]:
        """Return the response in the format of a server that does not stream.

        Raises:
            ServerError: The stream ended before the answer was complete.
        """
        if not self.ended and self.finish_reason is None:  # some servers send only one of the two
            raise ServerError("the server closed the connection in the middle of its answer. Ask again.")
        choice = {"text": "".join(self.texts), "finish_reason": self.finish_reason, "logprobs": self.logprobs or None}
        return {"choices": [choice], "usage": self.usage}


def is_thought(chunk: Any) -> bool:
    """Return whether a chunk of a stream has reasoning, and no text of the answer."""
    choice = _find_first_choice(chunk) if isinstance(chunk, dict) else None
    delta = None if choice is None else choice.get("delta")
    return isinstance(delta, dict) and not delta.get("content") and _has_reasoning(delta)


def _find_first_choice(chunk: dict[str, Any]) -> dict[str, Any] | None:
    """Return the part of a chunk that belongs to the first completion, or None."""
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        # The first completion has the index 0, or no index if the server sends only one completion.
        if isinstance(choice, dict) and not choice.get("index"):
            return choice
    return None


def _get_chunk_text(choice: dict[str, Any]) -> str:
    """Return the text in `delta` (chat), `text` (completion) or `message` (a server that does not stream)."""
    message = choice.get("delta", choice.get("message"))
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    if text is not None and not isinstance(text, str):
        raise ModelError(f"the server's stream has a chunk without answer text. {NOT_OPENAI_HINT}")
    return text or ""
