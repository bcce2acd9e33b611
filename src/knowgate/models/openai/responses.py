"""Replies of an OpenAI-compatible server as records; whatever is not as it should be is a ModelError.

Chat replies list tokens under logprobs.content. Raw completions list them in parallel arrays, or, on
llama.cpp, as chat does. Only the top tokens are known: entropy stays None unless thousands of them are listed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from knowgate.errors import ModelError, ServerError
from knowgate.models.openai.client import STREAM_END
from knowgate.types import Completion, Token

LOGPROB_TOLERANCE = 1e-3  # servers in half precision give log-probabilities this far above 0
MIN_LOGPROB = -9999.0  # what vLLM writes for a probability of 0; llama.cpp writes the lowest number there is
MAX_TOKEN_COUNT = 2**31  # a count beyond is none
MIN_TOKENS_FOR_ENTROPY, LARGE_VOCABULARY, NEGLIGIBLE_MASS = (
    1_000,
    150_000,
    1e-9,
)  # tokens listed, tokens of a large vocabulary, a share that is none


@dataclass(frozen=True)
class TokenLogprobs:
    """A token of a reply with the most probable ones at its place."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]

    @property
    def entropy(self) -> float | None:
        """In nats, where enough tokens are listed to know it well.

        What is not listed has some tokens as probable as the last one listed (the least its share can add), or is
        spread evenly over a large vocabulary (the most): the middle of the two is taken.
        """
        if len(self.top) < MIN_TOKENS_FOR_ENTROPY:
            return None
        values = np.array([value for _, value in self.top])
        rest = max(0.0, 1 - float(np.exp(values).sum()))
        listed = -float((np.exp(values) * values).sum())
        return listed + (
            rest * (-values[-1] + math.log(LARGE_VOCABULARY / rest)) / 2 if rest > NEGLIGIBLE_MASS else 0.0
        )


def parse_completions(reply: Any) -> list[Completion]:
    """The completions of a reply, in the server's order."""
    choices = _choices(reply)
    counts = _token_counts(reply, len(choices))
    return [_completion(choice, count) for choice, count in zip(choices, counts, strict=True)]


def parse_token_logprobs(reply: Any) -> list[TokenLogprobs] | None:
    """The tokens of the first choice with their alternatives; None when the server gave none."""
    return _listed(get_first_choice(reply))


def get_first_choice(reply: Any) -> dict[str, Any]:
    """The first choice as the server wrote it."""
    return _choices(reply)[0]


def parse_answer_ids(reply: Any) -> list[int]:
    """The token ids of the first choice, without the one that ended it; where a server was asked for them."""
    choice = _choices(reply)[0]
    ids = choice.get("token_ids", choice.get("response_token_ids"))
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ModelError("the server did not give the token ids of its answer. Use a newer one.")
    if choice.get("finish_reason") != "stop" or not ids:
        return ids
    matched = choice.get("matched_stop", choice.get("stop_reason"))  # SGLang says which token; vLLM only if it is odd
    return ids[:-1] if matched is None or matched == ids[-1] else ids


def compute_label_logprobs(top: Sequence[tuple[str, float]], labels: Sequence[str]) -> list[float]:
    """Log-probability of each label among the top tokens of one place.

    A label that is not listed gets the most it can have: the smallest listed probability, or, if it may be
    several tokens, that of the listed tokens it begins with. So it is never zero; where nothing is listed that says
    more, all labels have the same.
    """
    exact = [[x for text, x in top if text.strip() == label.strip()] for label in labels]
    return [_log_sum(found) if found else _most(top, label) for label, found in zip(labels, exact, strict=True)]


def is_label_missing(top: Sequence[tuple[str, float]], labels: Sequence[str]) -> bool:
    """Whether a label is not listed."""
    words = {text.strip() for text, _ in top}
    return any(label.strip() not in words for label in labels)


def _most(top: Sequence[tuple[str, float]], label: str) -> float:
    starts = [x for text, x in top if text.strip() and label.strip().startswith(text.strip())]
    smallest = min(x for _, x in top)
    return max(smallest, _log_sum(starts)) if starts else smallest


def _log_sum(values: Sequence[float]) -> float:
    return min(0.0, float(np.logaddexp.reduce(values)))


def _choices(reply: Any) -> list[dict[str, Any]]:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices or not all(isinstance(item, dict) for item in choices):
        raise ModelError(
            "the server's reply has no choices: it is not an OpenAI-compatible API. Check the URL; most end in /v1."
        )
    return choices


def _completion(choice: dict[str, Any], count: int) -> Completion:
    listed = _listed(choice)
    tokens = None if listed is None else tuple(Token(x.text, x.logprob, x.entropy, _margin(x)) for x in listed)
    return Completion(
        text=_text(choice),
        tokens=tokens,
        finished=choice.get("finish_reason") != "length",
        n_tokens=count if tokens is None else len(tokens),
    )


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text", choice)
    if text is None:  # a chat server's way to say nothing was generated
        return ""
    if not isinstance(text, str):
        raise ModelError("the server's reply has a choice without text.")
    return text


def _token_counts(reply: dict[str, Any], n: int) -> list[int]:
    """The server counts the choices together: split evenly, so that the sum is right."""
    usage = reply.get("usage")
    total = usage.get("completion_tokens") if isinstance(usage, dict) else None
    share, left = divmod(total if isinstance(total, int) and 0 <= total < MAX_TOKEN_COUNT else 0, n)
    return [share + (i < left) for i in range(n)]


def _listed(choice: dict[str, Any]) -> list[TokenLogprobs] | None:
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    try:
        if isinstance(logprobs.get("content"), list):
            return [_chat_token(item) for item in logprobs["content"]]
        if isinstance(logprobs.get("token_logprobs"), list):
            return _completion_tokens(logprobs)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ModelError("the server's reply has log-probabilities of an unknown form.") from None
    return None


def _chat_token(item: dict[str, Any]) -> TokenLogprobs:
    top = tuple((str(other["token"]), check_logprob(other["logprob"])) for other in item.get("top_logprobs") or ())
    return TokenLogprobs(str(item["token"]), check_logprob(item["logprob"]), _ordered(top))


def _completion_tokens(logprobs: dict[str, Any]) -> list[TokenLogprobs]:
    texts, values = logprobs["tokens"], logprobs["token_logprobs"]
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    return [
        TokenLogprobs(
            str(text), check_logprob(value), _ordered((str(x), check_logprob(y)) for x, y in (top or {}).items())
        )
        for text, value, top in zip(texts, values, tops, strict=True)
    ]


def _ordered(top: Any) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(top, key=lambda pair: -pair[1]))


def check_logprob(value: Any) -> float:
    """A log-probability, or an error for what cannot be one."""
    number = float(value)
    if math.isnan(number):
        raise ModelError("the server gave NaN as a log-probability: its weights or number format are bad.")
    if math.isinf(number) or number > LOGPROB_TOLERANCE:
        raise ModelError(f"the server gave {number} as a log-probability.")
    return min(0.0, max(MIN_LOGPROB, number))


def _margin(token: TokenLogprobs) -> float | None:
    if len(token.top) < 2:
        return None
    return math.exp(token.top[0][1]) - math.exp(token.top[1][1])


def assemble_stream(parts: Generator[Any, None, None]) -> Generator[str, None, dict[str, Any]]:
    """The text of each part as it comes; at the end the whole reply. Closing it closes `parts`."""
    reply = StreamedResponse()
    with contextlib.closing(parts):
        for part in parts:
            if text := reply.add(part):
                yield text
    return reply.whole()


@dataclass
class StreamedResponse:
    """The parts so far, of one choice. finish: why it stopped, if the server said so; ended: it said that it did."""

    texts: list[str] = field(default_factory=list)
    finish: str | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    usage: Any = None
    ended: bool = False

    def add(self, part: Any) -> str:
        """Take a part in; gives the text it brought. The part with the token count, and some others, bring none."""
        if part == STREAM_END:
            self.ended = True
            return ""
        if not isinstance(part, dict):
            raise ModelError(
                "the server's stream has a part that is no object: it is not an OpenAI-compatible API. "
                "Check the URL; most end in /v1."
            )
        self.usage = part.get("usage") or self.usage
        choice = _first_choice(part.get("choices"))
        if choice is None:
            return ""
        self.finish = choice.get("finish_reason") or self.finish
        self._add_logprobs(choice.get("logprobs"))
        text = _parts_text(choice)
        self.texts.append(text)
        return text

    def _add_logprobs(self, given: Any) -> None:
        """Lists, one item a token, under whatever names the endpoint has for them."""
        for name, values in (given if isinstance(given, dict) else {}).items():
            if isinstance(values, list):
                self.logprobs.setdefault(name, []).extend(values)

    def whole(self) -> dict[str, Any]:
        """The reply in one. Some servers do not say that it ended; but then they say why."""
        if not self.ended and self.finish is None:
            raise ServerError("the server broke off in the middle of its answer. Ask again.")
        choice = {"text": "".join(self.texts), "finish_reason": self.finish, "logprobs": self.logprobs or None}
        return {"choices": [choice], "usage": self.usage}


def _first_choice(choices: Any) -> dict[str, Any] | None:
    """One answer was asked for; parts of others, should a server send them in between, are not part of it."""
    listed = choices if isinstance(choices, list) else []
    return next((one for one in listed if isinstance(one, dict) and not one.get("index")), None)


def _parts_text(choice: dict[str, Any]) -> str:
    """`delta` in a chat, `text` of a completion, `message` where a server does not stream after all."""
    turn = choice.get("delta", choice.get("message"))
    text = turn.get("content") if isinstance(turn, dict) else choice.get("text")
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ModelError("the server's stream has a choice without text.")
    return text
