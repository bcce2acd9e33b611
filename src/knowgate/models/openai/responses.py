"""Parse the responses of an OpenAI-compatible server; malformed ones raise ModelError.

Chat responses list tokens under logprobs.content. Raw completions list them in parallel arrays or, on llama.cpp, as chat
does. Servers list only the most probable tokens, so the entropy is None unless they list thousands.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from knowgate.errors import ModelError, ServerError
from knowgate.models.openai.client import STREAM_END
from knowgate.types import Completion, Token

LOGPROB_TOLERANCE = 1e-3  # servers with half precision give log-probabilities this far above 0
MIN_LOGPROB = -9999.0  # vLLM writes this for probability 0, llama.cpp the lowest float
MAX_TOKEN_COUNT = 2**31
MIN_TOKENS_FOR_ENTROPY = 1_000
LARGE_VOCABULARY = 150_000
NEGLIGIBLE_MASS = 1e-9
NOT_OPENAI_HINT = "it is not an OpenAI-compatible API. Check the URL; most end in /v1."
TopTokens = Sequence[tuple[str, float]]  # texts and log-probabilities, most probable first


@dataclass(frozen=True)
class TokenLogprobs:
    """A token of a response, with the most probable tokens at its position."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]

    @property
    def entropy(self) -> float | None:
        """The entropy in nats, or None if too few tokens are listed.

        The mass of unlisted tokens adds least if they are as probable as the last listed token, and most if they are
        spread evenly over a large vocabulary. The mean of the two is used.
        """
        if len(self.top) < MIN_TOKENS_FOR_ENTROPY:
            return None
        values = np.array([value for _, value in self.top])
        unlisted = max(0.0, 1 - float(np.exp(values).sum()))
        entropy = -float((np.exp(values) * values).sum())
        if unlisted > NEGLIGIBLE_MASS:
            entropy += unlisted * (-values[-1] + math.log(LARGE_VOCABULARY / unlisted)) / 2
        return entropy

    @property
    def margin(self) -> float | None:
        """Probability of the first listed token minus that of the second, or None if there are fewer."""
        return None if len(self.top) < 2 else math.exp(self.top[0][1]) - math.exp(self.top[1][1])


# --- whole responses ------------------------------------------------------------------------------


def parse_completions(response: Any) -> list[Completion]:
    """Return the completions of a response, in the server's order."""
    choices = _get_choices(response)
    counts = _split_token_count(response, len(choices))
    return [_parse_completion(choice, count) for choice, count in zip(choices, counts, strict=True)]


def parse_token_logprobs(response: Any) -> list[TokenLogprobs] | None:
    """Return the tokens of the first choice with their alternatives, or None if the server gave none."""
    return _parse_logprobs(get_first_choice(response))


def get_first_choice(response: Any) -> dict[str, Any]:
    """Return the first choice as the server wrote it."""
    return _get_choices(response)[0]


def parse_answer_ids(response: Any) -> list[int]:
    """Return the token ids of the first choice, without the token that ended it."""
    choice = get_first_choice(response)
    ids = choice.get("token_ids", choice.get("response_token_ids"))
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ModelError("the server did not give the token ids of its answer. Use a newer release of it.")
    if choice.get("finish_reason") != "stop" or not ids:
        return ids
    # SGLang always names the stop token, vLLM only if it is not the usual one.
    stop_token = choice.get("matched_stop", choice.get("stop_reason"))
    return ids[:-1] if stop_token is None or stop_token == ids[-1] else ids


def _get_choices(response: Any) -> list[dict[str, Any]]:
    """Return the choices of a response; raises ModelError if there are none."""
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not choices or not all(isinstance(item, dict) for item in choices):
        raise ModelError(f"the server's response has no choices: {NOT_OPENAI_HINT}")
    return choices


def _parse_completion(choice: dict[str, Any], n_tokens: int) -> Completion:
    """Convert a choice; `n_tokens` is used if it has no log-probabilities."""
    logprobs = _parse_logprobs(choice)
    tokens = None if logprobs is None else tuple(Token(x.text, x.logprob, x.entropy, x.margin) for x in logprobs)
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text", choice)
    if text is not None and not isinstance(text, str):
        raise ModelError("the server's response has a choice without text.")
    return Completion(
        text=text or "",  # null means that nothing was generated
        tokens=tokens,
        finished=choice.get("finish_reason") != "length",
        n_tokens=n_tokens if tokens is None else len(tokens),
    )


def _split_token_count(response: dict[str, Any], n: int) -> list[int]:
    """Split the token count of a response evenly over its choices, because servers only give the sum."""
    usage = response.get("usage")
    total = usage.get("completion_tokens") if isinstance(usage, dict) else None
    share, remainder = divmod(total if isinstance(total, int) and 0 <= total < MAX_TOKEN_COUNT else 0, n)
    return [share + (i < remainder) for i in range(n)]


# --- log-probabilities ----------------------------------------------------------------------------


def _parse_logprobs(choice: dict[str, Any]) -> list[TokenLogprobs] | None:
    """Return the tokens of a choice with their alternatives, or None."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    with translate_format_errors("log-probabilities"):
        if isinstance(logprobs.get("content"), list):
            return [_parse_chat_token(item) for item in logprobs["content"]]
        if isinstance(logprobs.get("token_logprobs"), list):
            return _parse_parallel_arrays(logprobs)
    return None


def _parse_chat_token(item: dict[str, Any]) -> TokenLogprobs:
    top = [(other["token"], other["logprob"]) for other in item.get("top_logprobs") or ()]
    return TokenLogprobs(str(item["token"]), check_logprob(item["logprob"]), _parse_top(top))


def _parse_parallel_arrays(logprobs: dict[str, Any]) -> list[TokenLogprobs]:
    """Parse the log-probabilities of a raw completion."""
    texts, values = logprobs["tokens"], logprobs["token_logprobs"]
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    return [
        TokenLogprobs(str(text), check_logprob(value), _parse_top((top or {}).items()))
        for text, value, top in zip(texts, values, tops, strict=True)
    ]


def _parse_top(pairs: Iterable[tuple[Any, Any]]) -> tuple[tuple[str, float], ...]:
    checked = ((str(text), check_logprob(value)) for text, value in pairs)
    return tuple(sorted(checked, key=lambda pair: -pair[1]))


def check_logprob(value: Any) -> float:
    """Return a log-probability in [MIN_LOGPROB, 0], or raise ModelError if the value cannot be one."""
    number = float(value)
    if math.isnan(number):
        raise ModelError("the server gave NaN as a log-probability: its weights or number format are bad.")
    if math.isinf(number) or number > LOGPROB_TOLERANCE:
        raise ModelError(f"the server gave {number} as a log-probability.")
    return min(0.0, max(MIN_LOGPROB, number))


@contextlib.contextmanager
def translate_format_errors(what: str) -> Generator[None, None, None]:
    """Raise ModelError if a part of a response does not have the expected form."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
        raise ModelError(f"the server's response has {what} of an unknown form.") from None


def compute_label_logprobs(top: TopTokens, labels: Sequence[str]) -> list[float]:
    """Return the log-probability of each label, from the most probable tokens at one position.

    A label that is not listed gets an upper bound: the smallest listed probability or, if it may consist of several
    tokens, that of the listed tokens it begins with. So no label has probability 0.
    """
    exact = [[value for text, value in top if text.strip() == label.strip()] for label in labels]
    return [
        _log_sum_exp(values) if values else _bound_logprob(top, label)
        for label, values in zip(labels, exact, strict=True)
    ]


def is_label_missing(top: TopTokens, labels: Sequence[str]) -> bool:
    """Return whether a label is not among the listed tokens."""
    listed = {text.strip() for text, _ in top}
    return any(label.strip() not in listed for label in labels)


def _bound_logprob(top: TopTokens, label: str) -> float:
    """Return the largest log-probability that an unlisted label can have."""
    beginnings = [value for text, value in top if text.strip() and label.strip().startswith(text.strip())]
    smallest = min(value for _, value in top)
    return max(smallest, _log_sum_exp(beginnings)) if beginnings else smallest


def _log_sum_exp(values: Sequence[float]) -> float:
    return min(0.0, float(np.logaddexp.reduce(values)))


# --- streams --------------------------------------------------------------------------------------


def assemble_stream(chunks: Generator[Any, None, None]) -> Generator[str, None, dict[str, Any]]:
    """Yield the text of each chunk and return the whole response. Closing it closes `chunks`."""
    response = StreamedResponse()
    with contextlib.closing(chunks):
        for chunk in chunks:
            if text := response.add(chunk):
                yield text
    return response.build()


@dataclass
class StreamedResponse:
    """The first choice of a streamed response, assembled from its chunks.

    Args:
        texts: Text of each chunk.
        finish_reason: Why the server stopped, if it said so.
        logprobs: Log-probabilities so far, under the server's names for them.
        usage: Token counts, if the server sent them.
        ended: Whether the server sent STREAM_END.
    """

    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    usage: Any = None
    ended: bool = False

    def add(self, chunk: Any) -> str:
        """Add a chunk and return its text, which may be empty."""
        if chunk == STREAM_END:
            self.ended = True
            return ""
        if not isinstance(chunk, dict):
            raise ModelError(f"the server's stream has a chunk that is not an object: {NOT_OPENAI_HINT}")
        self.usage = chunk.get("usage") or self.usage
        choices = chunk.get("choices")
        choices = choices if isinstance(choices, list) else []
        choice = next((item for item in choices if isinstance(item, dict) and not item.get("index")), None)
        if choice is None:
            return ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        logprobs = choice.get("logprobs")
        for name, values in (logprobs if isinstance(logprobs, dict) else {}).items():
            if isinstance(values, list):
                self.logprobs.setdefault(name, []).extend(values)
        text = _get_chunk_text(choice)
        self.texts.append(text)
        return text

    def build(self) -> dict[str, Any]:
        """Return the response as it would have been without streaming."""
        if not self.ended and self.finish_reason is None:  # some servers send only one of the two
            raise ServerError("the server closed the connection in the middle of its answer. Send the question again.")
        choice = {"text": "".join(self.texts), "finish_reason": self.finish_reason, "logprobs": self.logprobs or None}
        return {"choices": [choice], "usage": self.usage}


def _get_chunk_text(choice: dict[str, Any]) -> str:
    """Return the text in `delta` (chat), `text` (completion) or `message` (a server that does not stream)."""
    message = choice.get("delta", choice.get("message"))
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    if text is not None and not isinstance(text, str):
        raise ModelError("the server's stream has a choice without text.")
    return text or ""
