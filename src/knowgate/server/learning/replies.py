"""The text of a reply, whole or streamed, read as it goes by. Nothing of the reply is changed or held up.

Of chats, of completions, and of the Responses API.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.background import BackgroundTask
from starlette.responses import Response

from knowgate.server.events import data_of
from knowgate.server.streaming import Streamed

ENDS = ("stop", "length")  # whoever limits answers limits both of those that are compared
LONGEST = 1 << 20  # bytes of a stream that are listened to; longer answers are not compared


@dataclass
class Heard:
    """What was said in a stream so far. is_whole: it came to its end."""

    parts: list[str] = field(default_factory=list)
    rest: bytes = b""
    size: int = 0
    is_whole: bool = False

    def hear(self, piece: bytes) -> None:
        self.size += len(piece)
        if self.size > LONGEST:
            return
        *lines, self.rest = (self.rest + piece).split(b"\n")
        for line in lines:
            chunk = data_of(line)
            choice = _choice(chunk)
            text = _text(choice.get("delta")) or _plain(choice.get("text")) or _delta(chunk)
            self.parts += [text] if text else []
            self.is_whole = self.is_whole or choice.get("finish_reason") in ENDS or _closes(chunk)

    @property
    def text(self) -> str | None:
        """None where it broke off."""
        return "".join(self.parts) if self.is_whole else None


def listen(response: Response, then: Callable[[str | None], None]) -> None:
    """Tells what was said when the reply has gone out; None for a reply that broke off."""
    if isinstance(response, Streamed):
        heard, over = Heard(), response.when_over
        response.pieces = overheard(response.pieces, heard)

        def tell_both() -> None:
            over()
            then(heard.text)

        response.when_over = tell_both
        return

    async def tell() -> None:
        then(said_in(response))

    response.background = BackgroundTask(tell)


async def overheard(pieces: AsyncGenerator[bytes, None], heard: Heard) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in pieces:
            heard.hear(piece)
            yield piece
    finally:
        await pieces.aclose()


def said_in(response: Response) -> str | None:
    """The answer in a reply of one piece; None where there is none."""
    if response.status_code != 200:
        return None
    try:
        record = json.loads(bytes(response.body))
    except ValueError:
        return None
    choice = _choice(record)
    if choice.get("finish_reason") in ENDS:
        return _text(choice.get("message")) or _plain(choice.get("text")) or None
    return _responded(record) or None


def _choice(record: Any) -> Mapping[str, Any]:
    choices = record.get("choices") if isinstance(record, dict) else None
    first = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    return first if isinstance(first, dict) else {}


def _text(said: Any) -> str:
    content = said.get("content") if isinstance(said, dict) else None
    return content if isinstance(content, str) else ""


def _plain(text: Any) -> str:
    return text if isinstance(text, str) else ""


# --- the Responses API ------------------------------------------------------------------------------


def _delta(chunk: Any) -> str:
    is_text = isinstance(chunk, dict) and chunk.get("type") == "response.output_text.delta"
    return _plain(chunk.get("delta")) if is_text else ""


def _closes(chunk: Any) -> bool:
    """A response that only the limit of its tokens stopped counts as whole, as of chats."""
    return isinstance(chunk, dict) and chunk.get("type") in ("response.completed", "response.incomplete")


def _responded(record: Any) -> str:
    """The text of a response that is one message; '' where a tool was called or it is not there yet."""
    if not isinstance(record, dict) or record.get("status") not in ("completed", "incomplete"):
        return ""
    output = record.get("output")
    items = [one for one in output if isinstance(one, dict)] if isinstance(output, list) else []
    said = [one for one in items if one.get("type") != "reasoning"]
    if len(said) != 1 or said[0].get("type") != "message" or not isinstance(said[0].get("content"), list):
        return ""
    parts = [one for one in said[0]["content"] if isinstance(one, dict) and one.get("type") == "output_text"]
    return "".join(_plain(part.get("text")) for part in parts)
