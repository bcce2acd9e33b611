"""Parses and annotates server-sent events."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from knowgate.core import split_batches
from knowgate.core.validation import MAX_DEPTH, check_json_depth, count_json_values
from knowgate.errors import BadInput
from knowgate.server.json_api import (
    LARGE_BODY_BYTES,
    ApiError,
    dump_json,
    load_json,
    replace_non_finite,
)
from knowgate.server.telemetry.trace import RequestTrace, TokenUsage

log = logging.getLogger(__name__)

Result = TypeVar("Result")
WINDOW_BYTES = 16 << 10  # the part of a stream that is split into lines at once
MAX_EVENT_LINES = 50_000  # maximum number of `data:` lines of one event
MAX_EVENT_BYTES = 8 << 20  # maximum size of one event of a stream
MAX_EVENT_VALUES = 1_000_000  # maximum number of JSON values of one event
MAX_STREAM_LINES = 600_000  # maximum number of lines of a stream, which is 200,000 events of three lines
SLICE_LINES, SLICE_BYTES = 64, 64 << 10  # after so many lines or bytes of a stream, other tasks run
CLOSE_SECONDS = 0.1  # maximum time from the event [DONE] to the end of a stream, for its connection to be used again
DONE_EVENT = b"data: [DONE]\n\n"
CUT_MESSAGE = "the upstream closed the connection before the answer was complete."
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Runs that mean the same as one of their parts: several blank lines, and several events that are only a comment.
BLANK_RUN = re.compile(rb"\n{3,}|(?:\r\n){3,}")
REPEATED_COMMENT = re.compile(rb"(?<=\n):[^\r\n]*+(?:\n\n|\r\n\r\n)(?=:)")  # before another comment
# Last event of the Responses API, which has no event [DONE].
RESPONSE_END = re.compile(rb'"type": ?"(?:response\.(?:completed|incomplete|failed)|error)"')
# All chunks of a streamed chat completion except the last one contain a finish reason of null, or of "" from some servers.
CHOICES_MARKERS = (b'"choices":[', b'"choices": [')
UNFINISHED_MARKERS = tuple(b'"finish_reason":%s' % value for value in (b"null", b" null", b'""', b' ""'))


class InvalidResponse(Exception):
    """A response of the upstream that cannot be forwarded. The message says why."""


# --- fair shares of the event loop ----------------------------------------------------------------

TURN_LOCKS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


class WorkSlice:
    """Regular pauses in the processing of a stream. A fast stream would block all other requests."""

    def __init__(self) -> None:
        self._lines = self._bytes = 0

    async def add(self, byte_count: int) -> None:
        """Count one line of `byte_count` bytes. From time to time, let other tasks run."""
        self._lines += 1
        self._bytes += byte_count
        if self._lines < SLICE_LINES and self._bytes < SLICE_BYTES:
            return
        self._lines = self._bytes = 0
        # All streams of an event loop share one lock, so they continue one after the other.
        async with TURN_LOCKS.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            await asyncio.sleep(0)  # all other tasks run once


# --- events ---------------------------------------------------------------------------------------


def drop_repetitions(chunk: bytes) -> bytes:
    r"""Remove repeated blank lines and comments of an event stream: b"\n\n\n\n" becomes b"\n\n"."""
    if b"\n\n\n" in chunk or b"\r\n\r\n\r\n" in chunk:
        chunk = BLANK_RUN.sub(lambda match: b"\r\n\r\n" if match[0].startswith(b"\r") else b"\n\n", chunk)
    return REPEATED_COMMENT.sub(b"", chunk) if b"\n:" in chunk else chunk


async def split_lines(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Split a byte stream into lines with their endings. Of several blank lines or comments in a row, one remains.

    Raises:
        InvalidResponse: A line exceeds MAX_EVENT_BYTES, or there are more than MAX_STREAM_LINES lines.
    """
    work = WorkSlice()  # lets other requests run
    parts: list[bytes] = []  # the current line, which may be spread over several windows
    line_bytes = 0  # size of the current line
    line_count = 0
    was_blank = True  # whether the previous line was blank
    ends_in_cr = False  # whether the previous window ended in CR
    async for window in _split_windows(chunks, work):
        if ends_in_cr and window.startswith(b"\n"):  # CR LF was split, and CR has already ended the line
            window = window[1:]
        ends_in_cr = window.endswith(b"\r")
        for part in drop_repetitions(window).splitlines(keepends=True):
            parts.append(part)
            line_bytes += len(part)
            if line_bytes > MAX_EVENT_BYTES:
                raise InvalidResponse(f"the stream has a line of more than {MAX_EVENT_BYTES:,} bytes")
            if not part.endswith((b"\n", b"\r")):
                continue  # the line goes on in the next window
            line_count += 1
            if line_count > MAX_STREAM_LINES:
                raise InvalidResponse(f"the stream has more than {MAX_STREAM_LINES:,} lines")
            line = _normalize_line(b"".join(parts), is_first=line_count == 1)
            is_blank = line == b"\n"
            if not (is_blank and was_blank):
                yield line
            parts, line_bytes, was_blank = [], 0, is_blank  # the next line begins
            await work.add(0)  # the bytes were counted with the chunk
    if parts:
        yield b"".join(parts)


async def _split_windows(chunks: AsyncIterable[bytes], work: WorkSlice) -> AsyncGenerator[bytes, None]:
    """Split a byte stream into windows. In a window of one large chunk, tiny lines would take many times its memory."""
    async for chunk in chunks:
        await work.add(len(chunk))
        for window in split_batches(chunk, WINDOW_BYTES):
            yield window


def _normalize_line(line: bytes, *, is_first: bool) -> bytes:
    """Remove the byte order mark of the first line of a stream, and let lines that end in CR or CR LF end in LF.

    Some clients see the end of an event only if all its lines end alike.
    """
    if is_first:
        line = line.removeprefix(BYTE_ORDER_MARK)
    if line.endswith(b"\r\n"):
        return line[:-2] + b"\n"
    return line[:-1] + b"\n" if line.endswith(b"\r") else line


async def join_data_lines(lines: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Join `data:` lines that together hold one JSON object into one line. Other lines stay as they are.

    Raises:
        InvalidResponse: An event exceeds MAX_EVENT_BYTES.
    """
    event: list[bytes] = []  # `data:` lines of a JSON object that has begun, and may go on in the next line
    event_bytes = 0
    async for line in lines:
        is_data = line.startswith(b"data:")
        if event and not (is_data and _is_incomplete(event)):
            yield _join_event(event)
            event, event_bytes = [], 0
        starts_object = is_data and line[len(b"data:") :].lstrip().startswith(b"{")
        if not event and not starts_object:
            yield line
            continue
        if line.strip() != b"data:" or len(event) < 2:  # further empty lines mean nothing in JSON
            event.append(line)
        event_bytes += len(line)
        if event_bytes > MAX_EVENT_BYTES or len(event) > MAX_EVENT_LINES:
            raise InvalidResponse(
                f"the stream has an event of more than {MAX_EVENT_BYTES:,} bytes or {MAX_EVENT_LINES:,} lines"
            )
    if event:
        yield _join_event(event)


def _is_incomplete(event: list[bytes]) -> bool:
    """Return whether the JSON object of an event goes on in the next `data:` line, rather than a new event beginning.

    A first line that is a whole object is complete: some servers send no blank line between events. A long first line
    counts as complete, because parsing it would delay other requests.
    """
    return len(event) > 1 or (len(event[0]) <= LARGE_BODY_BYTES and parse_event_data(event[0]) is None)


def _join_event(event: list[bytes]) -> bytes:
    """Join the `data:` lines of a JSON object. In JSON, a space means the same as a line break."""
    if len(event) == 1:
        return event[0]
    texts = [line.rstrip(b"\r\n") for line in event[:-1]] + event[-1:]
    return b"data:" + b" ".join(text.removeprefix(b"data:") for text in texts)


async def read_event_lines(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an event stream up to its event [DONE]. The rest is read for CLOSE_SECONDS and ignored.

    Raises:
        InvalidResponse: The stream contains no event with data other than [DONE], or is too large.
    """
    lines = join_data_lines(split_lines(chunks))
    has_data = is_done = False
    async for line in lines:
        is_done = is_done_event(line)
        has_data = has_data or (line.startswith(b"data:") and not is_done)
        if has_data or not is_done:
            yield line
        if is_done:
            break
    if not has_data:
        raise InvalidResponse("the event stream has no events")
    if not is_done:  # the stream ended without the event [DONE]
        return
    yield b"\n"  # the blank line after the event [DONE]
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            async for _ in lines:
                pass


def is_done_event(line: bytes) -> bool:
    """Return whether a line is the event [DONE], which ends a stream."""
    return line.startswith(b"data:") and line[len(b"data:") :].strip() == b"[DONE]"


async def chain_lines(first: Iterable[bytes], remaining: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the lines that have already been read, then the remaining lines of the stream."""
    work = WorkSlice()  # lets other requests run
    for line in first:
        yield line
        await work.add(len(line))
    async for line in remaining:
        yield line


def _load_event(text: bytes) -> Any:
    """Parse the JSON of an event. Parsing millions of lists at once would block other threads."""
    if count_json_values(text, MAX_EVENT_VALUES) > MAX_EVENT_VALUES:
        raise InvalidResponse(f"an event has more than {MAX_EVENT_VALUES:,} JSON values")
    return load_json(text)


def parse_event_data(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a `data:` line, or None. Other lines have no JSON object.

    Raises:
        InvalidResponse: The line has more than MAX_EVENT_VALUES values.
    """
    text = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or not text.startswith(b"{"):
        return None
    with suppress(ValueError, RecursionError):
        value = _load_event(text)
        return value if isinstance(value, dict) else None
    return None


def is_whole_line(line: bytes) -> bool:
    """Return whether the last line of a stream is complete, rather than the beginning of a JSON object."""
    return line.endswith(b"\n") or is_done_event(line) or parse_event_data(line) is not None


def format_event(data: Any) -> bytes:
    """Format JSON data as one server-sent event."""
    return b"data: " + dump_json(data) + b"\n\n"


def format_error_end(error: ApiError) -> bytes:
    """Return the last events of a stream that failed: the error, and the event [DONE]."""
    return format_event(error.to_json()) + DONE_EVENT


def has_finish_reason(line: bytes) -> bool:
    """Return whether a line of a streamed chat is its last chunk, which has a finish reason."""
    return b'"finish_reason"' in line and not any(marker in line for marker in UNFINISHED_MARKERS)


def _is_error(line: bytes) -> bool:
    """Return whether a line is an error. A long line is none, because parsing it would delay other requests."""
    is_candidate = b'"error"' in line and len(line) <= LARGE_BODY_BYTES
    event = (parse_event_data(line) if is_candidate else None) or {}
    return bool(event.get("error")) or event.get("type") in ("error", "response.failed")  # the Responses API


def has_error(event: bytes) -> bool:
    """Return whether one of the lines of an event is an error. A large event is none, like a long line."""
    return len(event) <= LARGE_BODY_BYTES and b'"error"' in event and any(map(_is_error, event.splitlines()))


class StreamEnd:
    """Check whether a stream has ended properly. A cut stream has no finish reason, error or [DONE]."""

    def __init__(self) -> None:
        self._has_result = False  # whether there was a finish reason or an error
        self._has_last_event = False  # whether there was [DONE], or the last event of the Responses API

    def add(self, line: bytes) -> None:
        """Note whether a line of the stream is its last event, or ends the answer."""
        if not line.startswith(b"data:"):
            return
        if is_done_event(line) or RESPONSE_END.search(line):
            self._has_last_event = True
        elif has_finish_reason(line) or _is_error(line):
            self._has_result = True

    def format_missing_events(self) -> bytes:
        """Return the events missing at the end of the stream. A cut answer also gets an error event."""
        if self._has_last_event:
            return b""
        if self._has_result:
            return DONE_EVENT
        return format_error_end(ApiError(502, CUT_MESSAGE, "upstream_broke_off"))


LogprobsFilter = Callable[[dict[str, Any]], None]


def check_chunk(line: bytes) -> None:
    """Check that a line of a streamed answer can be forwarded. To save time, only suspicious lines are parsed.

    Raises:
        InvalidResponse: `choices` is not a list, or the JSON is nested too deeply or has too many values.
    """
    has_choices_list = any(marker in line for marker in CHOICES_MARKERS)  # such as b'"choices":['
    has_other_choices = b'"choices"' in line and not has_choices_list
    may_be_deep = line.count(b"[") + line.count(b"{") > MAX_DEPTH
    if not line.startswith(b"data:") or not (has_other_choices or may_be_deep):
        return
    try:
        value = _load_event(line[len(b"data:") :])
        check_json_depth(line.decode(errors="replace"), "the event")
    except (RecursionError, BadInput):
        raise InvalidResponse(f"an event is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError:
        return  # an event that is not JSON, such as [DONE]
    if isinstance(value, dict) and not isinstance(value.get("choices") or [], list):
        raise InvalidResponse("the stream has an event whose field `choices` is not a list")


class StreamAnnotator:
    """Adds the `knowgate` object to the first chunk of a streamed answer and to its last chunk.

    Args:
        trace: Trace of the request, from which the `knowgate` object is made.
        hide_logprobs: Removes from a chunk, in place, log-probabilities that only the gate requested. None if there
            are none.
    """

    def __init__(self, trace: RequestTrace, *, hide_logprobs: LogprobsFilter | None = None):
        self.trace = trace
        self.hide_logprobs = hide_logprobs
        self.has_annotated_first = False

    def annotate(self, line: bytes) -> bytes:
        """Return a line of a streamed answer for the client. First and last chunk get the `knowgate` report.

        Raises:
            InvalidResponse: The line has invalid `choices`, or its JSON is nested too deeply.
        """
        check_chunk(line)
        if b"NaN" in line or b"Infinity" in line:
            line = b"data: " + replace_non_finite(line.removeprefix(b"data:")).strip() + b"\n"
        # The last chunk of a chat has a finish reason. The Responses API has a special last event.
        is_last = has_finish_reason(line) or RESPONSE_END.search(line) is not None
        adds_report = is_last or not self.has_annotated_first
        adds_usage = self.trace.extra_usage != TokenUsage() and b'"usage"' in line
        if not (adds_report or adds_usage or self.hide_logprobs):
            return line  # without parsing it, to save time
        chunk = parse_event_data(line)
        if chunk is None:
            return line
        if adds_report:
            chunk["knowgate"] = self.trace.to_json()
            self.has_annotated_first = True
        if self.hide_logprobs is not None:
            self.hide_logprobs(chunk)
        if adds_usage:
            self.trace.extra_usage.add_to(chunk)
        return b"data: " + dump_json(chunk, is_large=len(line) > LARGE_BODY_BYTES) + b"\n"
