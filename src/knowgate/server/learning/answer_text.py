"""The text of an answer that the server sends, also of a stream."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.background import BackgroundTask
from starlette.responses import Response

from knowgate.core.text import MAX_ANSWER_CHARS
from knowgate.server.client_connection import EventStreamResponse
from knowgate.server.json_api import load_json
from knowgate.server.streaming import InvalidResponse, parse_event_data
from knowgate.server.upstream.draft import TOOL_FIELDS
from knowgate.server.upstream.response_body import run_for_size

MAX_STREAM_BYTES = 4 << 20  # longer streams are not compared
NO_TEXT_EVENTS = ("response.function_call", "response.custom_tool_call", "response.refusal")
AnswerCallback = Callable[[str | None, bool], Coroutine[Any, Any, None]]
running_callbacks: set[asyncio.Future[None]] = set()


@dataclass
class StreamText:
    """Collector for the beginning of a streamed answer. It works for the APIs of chats, completions and responses."""

    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False
    is_too_large: bool = False  # to be compared
    _has_several_answers: bool = False  # for a request with n > 1
    _calls_tool: bool = False
    _incomplete_line: bytes = b""
    _byte_count: int = 0
    _char_count: int = 0

    def feed(self, data: bytes) -> None:
        """Add the text in the next bytes of the stream. The bytes may end within a line."""
        self._byte_count += len(data)
        self.is_too_large |= self._byte_count > MAX_STREAM_BYTES
        if self.is_too_large:
            self._incomplete_line = b""
            return
        *lines, self._incomplete_line = (self._incomplete_line + data).split(b"\n")
        for line in lines:
            self._add_chunk(parse_event_data(line) or {})

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        """Add the text of one chunk of a chat, a completion or the Responses API."""
        choice = _get_only_choice(chunk)
        self._has_several_answers |= bool(choice.get("index")) or (bool(chunk.get("choices")) and not choice)
        event_type = chunk.get("type")
        if event_type == "response.output_text.delta":  # the Responses API
            text = _as_text(chunk.get("delta"))
        else:  # a chat has a "delta", a completion has a "text"
            text = _get_content(choice.get("delta")) or _as_text(choice.get("text"))
        if text and self._char_count < MAX_ANSWER_CHARS:  # nothing reads more, and many streams can be open
            self.pieces.append(text[:MAX_ANSWER_CHARS])
            self._char_count += len(text)
        is_last_event = event_type in ("response.completed", "response.incomplete")
        if is_last_event or choice.get("finish_reason"):
            self.is_complete = True
        is_call = event_type is not None and str(event_type).startswith(NO_TEXT_EVENTS)
        self._calls_tool |= is_call or _calls_tool(choice, "delta")

    @property
    def is_unreadable(self) -> bool:
        """Whether the answer is too large, or complete but no text, such as a tool call."""
        return not self._has_several_answers and (self.is_too_large or (self.is_complete and self._calls_tool))

    @property
    def text(self) -> str | None:
        """The beginning of the answer. None if it is unreadable, if there are several, or if the stream ended before its end."""
        is_readable = self.is_complete and not self._has_several_answers and not self.is_unreadable
        return "".join(self.pieces) if is_readable else None


def capture_answer(response: Response, callback: AnswerCallback) -> None:
    """Call a function with the answer of a response, after the response was sent.

    Args:
        response: The response, which is changed in place.
        callback: Function that gets the text of the answer, or None if the answer is incomplete or has no text; and whether
            it is too large to be read, or no text.
    """
    if not isinstance(response, EventStreamResponse):
        # A normal reference would be circular, so the memory of the request could not be freed at once.
        response.background = BackgroundTask(_call_with_answer, weakref.ref(response), callback)
        return
    stream_text = StreamText()
    response.events = _copy_stream(response.events, stream_text)
    original_on_close = response.on_close

    def close() -> None:
        original_on_close()
        task = asyncio.ensure_future(callback(stream_text.text, stream_text.is_unreadable))
        running_callbacks.add(task)  # asyncio itself keeps no reference
        task.add_done_callback(running_callbacks.discard)

    response.on_close = close


async def _call_with_answer(reference: weakref.ref[Response], callback: AnswerCallback) -> None:
    """Call a function with the answer in a response that is not streamed. Runs as a background task of the response."""
    response = reference()
    assert response is not None  # it runs this task
    await callback(*await run_for_size(len(response.body), lambda: extract_answer(response)))


async def _copy_stream(events: AsyncGenerator[bytes, None], copy: StreamText) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream unchanged, and add their text to `copy`."""
    async with aclosing(events):
        async for event in events:
            try:
                await run_for_size(len(event), partial(copy.feed, event))
            except InvalidResponse:  # it is forwarded, but cannot be compared
                copy.is_too_large = True
            yield event


def extract_answer(response: Response) -> tuple[str | None, bool]:
    """Return the answer text of a response that is not streamed, and whether it has an answer that is no text.

    The text is None for several answers, errors, and answers that are no text, such as tool calls.
    """
    try:
        body = load_json(bytes(response.body)) if response.status_code == 200 else None
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        return None, False
    if not isinstance(body.get("choices"), list):  # the Responses API
        text = _extract_response_text(body) or None
        return text, text is None
    if len(body["choices"]) > 1:
        return None, False
    choice = _get_only_choice(body)
    if not choice or _calls_tool(choice, "message"):
        return None, True
    return _get_content(choice.get("message")) or _as_text(choice.get("text")), False  # a chat, or a completion


def _calls_tool(choice: Mapping[str, Any], field_name: str) -> bool:
    """Return whether a choice is a tool call. Its field "message" or "delta" has the message."""
    message = choice.get(field_name)
    calls = [message.get(name) for name in TOOL_FIELDS] if isinstance(message, dict) else []
    return any(calls) or choice.get("finish_reason") in TOOL_FIELDS


def _get_only_choice(body: Any) -> Mapping[str, Any]:
    """Return the only choice of a completion. Return {} for none or several."""
    choices = body.get("choices") if isinstance(body, dict) else None
    first = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    return first if isinstance(first, dict) else {}


def _get_content(message: Any) -> str:
    """Return the text of a chat message, or "" if it has none."""
    return _as_text(message.get("content")) if isinstance(message, dict) else ""


def _as_text(value: Any) -> str:
    """Return a string as it is, and "" for every other value."""
    return value if isinstance(value, str) else ""


def _extract_response_text(body: Any) -> str:
    """Return the text of a Responses API message, ignoring its reasoning.

    Return "" for other outputs, such as tool calls.
    """
    if not isinstance(body, dict) or body.get("status") not in ("completed", "incomplete"):
        return ""
    outputs = [output for output in _list_objects(body.get("output")) if output.get("type") != "reasoning"]
    if len(outputs) != 1 or outputs[0].get("type") != "message":
        return ""
    parts = _list_objects(outputs[0].get("content"))
    return "".join(_as_text(part.get("text")) for part in parts if part.get("type") == "output_text")


def _list_objects(value: Any) -> list[dict[str, Any]]:
    """Return the JSON objects in a list. Returns no objects if the value is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
