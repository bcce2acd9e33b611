"""What is asked: the stand-alone question of a chat, or why there is none that a gate could decide on.

Knows the form of chat messages. Never changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from knowgate.errors import BadInput
from knowgate.pipeline import from_messages
from knowgate.server.problems import Problem
from knowgate.types import Model, Question

LONGEST = 20_000  # characters; what is longer is a text to work on, not a question


@dataclass(frozen=True)
class Ungated:
    """Nothing can be decided here; the request goes on as it is."""

    why: str


def messages_of(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The messages, found to be objects with a role."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Problem(400, "'messages' must be a list of at least one message.", "invalid_messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Problem(400, "each message must be an object with a 'role'.", "invalid_messages")
    return messages


def question_of(model: Model, messages: Sequence[Mapping[str, Any]]) -> Question | Ungated:
    """model: whoever rewrites a follow-up so that it stands alone."""
    last = messages[-1]
    if last["role"] != "user":
        return Ungated(f"the last message is not the user's but of the role '{last['role'][:40]}'")
    text = plain_text(last.get("content"))
    if text is None:
        return Ungated("the user's message holds more than text")
    if not text.strip():
        return Ungated("the user's message is empty")
    if len(text) > LONGEST:
        return Ungated(f"the user's message has more than {LONGEST:,} characters")
    try:
        return from_messages(model, [*_talk(messages[:-1]), {"role": "user", "content": text}])
    except BadInput as error:
        return Ungated(str(error).rstrip("."))


def _talk(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was said by the two sides, as far as it is text."""
    said = [(message["role"], plain_text(message.get("content"))) for message in messages]
    return [{"role": role, "content": text} for role, text in said if role in ("user", "assistant") and text]


def plain_text(content: object) -> str | None:
    """A content that is text, whole or in parts; None for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(content) else None
