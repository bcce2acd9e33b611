"""A reply that comes in parts, put together to what it would have been in one: so both are read by the same code."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from knowgate.errors import ModelError, ServerError
from knowgate.models.openai.events import DONE


def gather(parts: Generator[Any, None, None]) -> Generator[str, None, dict[str, Any]]:
    """The text of each part as it comes; at the end the whole reply. Closing it closes `parts`."""
    reply = GatheredReply()
    with contextlib.closing(parts):
        for part in parts:
            if text := reply.add(part):
                yield text
    return reply.whole()


@dataclass
class GatheredReply:
    """The parts so far, of one choice. finish: why it stopped, if the server said so; ended: it said that it did."""

    texts: list[str] = field(default_factory=list)
    finish: str | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    usage: Any = None
    ended: bool = False

    def add(self, part: Any) -> str:
        """Take a part in; gives the text it brought. The part with the token count, and some others, bring none."""
        if part == DONE:
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
        text = _text(choice)
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


def _text(choice: dict[str, Any]) -> str:
    """`delta` in a chat, `text` of a completion, `message` where a server does not stream after all."""
    turn = choice.get("delta", choice.get("message"))
    text = turn.get("content") if isinstance(turn, dict) else choice.get("text")
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ModelError("the server's stream has a choice without text.")
    return text
