"""Reads responses of the upstream, with limits on their size, number of JSON values and nesting."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import aiohttp

from knowgate.core.text import MAX_ANSWER_CHARS
from knowgate.core.validation import MAX_DEPTH, check_json_depth, count_json_values
from knowgate.errors import BadInput
from knowgate.models.fair_executor import FairExecutor
from knowgate.models.openai.responses import drop_reasoning_logprobs
from knowgate.server.json_api import LARGE_BODY_BYTES, MAX_JSON_VALUES, dump_json, load_json
from knowgate.server.load_limits import choose_runner, run_in_thread, run_in_turn
from knowgate.server.streaming import InvalidResponse, LogprobsFilter

Result = TypeVar("Result")
_large_text_thread = FairExecutor(1)  # shared by all requests of this process
MAX_CONTENT_BYTES = 16 << 20  # maximum size of a response that is not streamed, after decompression
MAX_FREE_BYTES = 1 << 20  # larger responses wait for a place, because clients may read them slowly
MAX_FREE_EVENT_BYTES = 256 << 10  # the same for an event of a stream, which is in memory several times while it is read
MEMORY_FACTOR = 8  # a parsed response with log-probabilities takes about as many times the memory of its text
MIN_TOP_LOGPROBS = 2  # some gates compare the two most probable tokens
MAX_STREAM_BYTES = 256 << 20  # maximum size of a stream, after decompression
MAX_RESPONSE_VALUES = 1_000_000
MAX_INLINE_MESSAGES = 8 << 10  # bytes of a request; to find the question of a larger one takes milliseconds
PIECE_BYTES = 64 << 10  # compressed data is decompressed in pieces of this size
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # the format of compressed data is detected
GZIP_MARK = b"\x1f"  # first byte of a member of gzip data


async def iter_chunks(
    response: aiohttp.ClientResponse, max_bytes: int = MAX_STREAM_BYTES, *, is_kept: Callable[[], bool] | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield the body of a response as it arrives, decompressed.

    Args:
        response: The response. Beyond MAX_FREE_BYTES of a body that is kept, its `wait_for_place` is called, if it has one.
        max_bytes: Maximum size of the body.
        is_kept: Returns whether the caller keeps the body in memory at present. By default, it never does.

    Raises:
        InvalidResponse: The body is larger than `max_bytes`, or compressed in a format that is not supported.
    """
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip", "x-gzip", "deflate"):
        raise InvalidResponse("the body is compressed in a format that was not requested")
    decompressor = None if encoding in ("identity", "") else Decompressor()
    size = 0
    wait_for_place = getattr(response, "wait_for_place", None)
    async for chunk in response.content.iter_any():
        pieces: Iterable[bytes] = [chunk] if decompressor is None else decompressor.decompress(chunk)
        for piece in pieces:
            size += len(piece)
            if size > max_bytes:
                raise InvalidResponse(f"the body is larger than {max_bytes:,} bytes")
            yield piece
            if size > MAX_FREE_BYTES and wait_for_place is not None and is_kept is not None and is_kept():
                await wait_for_place(size)
            if decompressor is not None:
                await asyncio.sleep(0)  # a small chunk can become large, so let other requests run


class Decompressor:
    """Decompressor of gzip and zlib data. Gzip data may have several members, one after the other."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(GZIP_OR_ZLIB)  # decompressor of the current member

    def decompress(self, chunk: bytes) -> Iterator[bytes]:
        """Decompress a chunk in pieces, to save memory. Data after the last member is ignored."""
        try:
            while chunk:
                if self._member.eof:
                    if not chunk.startswith(GZIP_MARK):  # the chunk does not begin another member
                        return
                    self._member = zlib.decompressobj(GZIP_OR_ZLIB)
                yield self._member.decompress(chunk, PIECE_BYTES)
                chunk = self._member.unconsumed_tail or self._member.unused_data
        except zlib.error:
            raise InvalidResponse("the compressed body is invalid") from None


async def read_content(response: aiohttp.ClientResponse, max_bytes: int = MAX_CONTENT_BYTES) -> bytes:
    """Read the whole body of a response, and close the response.

    Raises:
        InvalidResponse: The body is larger than `max_bytes`.
    """
    async with response:
        return b"".join([chunk async for chunk in iter_chunks(response, max_bytes, is_kept=lambda: True)])


async def wait_for_memory(response: aiohttp.ClientResponse, memory: int) -> None:
    """Wait for a place among large responses, if a response takes as much memory as one when parsed.

    Args:
        response: The response.
        memory: Estimate of the memory for the response and what is parsed from it, in bytes.
    """
    wait_for_place = getattr(response, "wait_for_place", None)
    if memory > MEMORY_FACTOR * MAX_FREE_BYTES and wait_for_place is not None:
        await wait_for_place(memory // MEMORY_FACTOR)


async def wait_for_event(response: aiohttp.ClientResponse, size: int) -> None:
    """Wait for a place among large responses, if an event of a stream is large. `size` is in bytes."""
    wait_for_place = getattr(response, "wait_for_place", None)
    if size > MAX_FREE_EVENT_BYTES and wait_for_place is not None:
        await wait_for_place(size)


def parse_upstream_json(content: bytes, max_values: int = MAX_RESPONSE_VALUES) -> Any:
    """Parse JSON of the upstream, which may contain NaN.

    Raises:
        InvalidResponse: The text is not valid JSON, has too many values, or is nested too deeply.
    """
    if count_json_values(content, max_values) > max_values:
        raise InvalidResponse(f"the body of the reply has more than {max_values:,} JSON values")
    try:
        # Other encodings of JSON are rejected, because the object `knowgate` is inserted into the bytes as UTF-8.
        text = content.decode("utf-8-sig", "surrogatepass")
        value = load_json(text)
        check_json_depth(text, "the response")
    except (RecursionError, BadInput):
        raise InvalidResponse(f"the JSON is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError:
        raise InvalidResponse("the body is not valid JSON") from None
    return value


async def run_for_size(byte_count: int, work: Callable[[], Result], max_inline: int = LARGE_BODY_BYTES) -> Result:
    """Run a function, in a thread for large texts. Other requests need not wait then.

    Large texts are processed one at a time, and API keys take turns: parsing holds Python's global lock, so several
    threads would leave little time for other requests.

    Args:
        byte_count: Size of the text that the function parses or writes.
        work: The function.
        max_inline: Size up to which a text is not large.
    """
    return work() if byte_count <= max_inline else await run_in_thread(_large_text_thread, work)


async def run_for_request(byte_count: int, work: Callable[[], Result]) -> Result:
    """Run a function that reads or writes a chat of this size: if it is large, in turn or in a thread."""
    if byte_count <= LARGE_BODY_BYTES:
        return work()
    return await choose_runner(_large_text_thread, byte_count, MAX_JSON_VALUES)(work)


async def write_request(body: Mapping[str, Any], raw_body: bytes) -> bytes:
    """Write a changed request as JSON: if it is large, in turn or in a thread.

    Args:
        body: The changed request.
        raw_body: The request of the client, or b"" for a request of this server.
    """
    if len(raw_body) <= LARGE_BODY_BYTES:
        return dump_json(body)
    run = choose_runner(_large_text_thread, len(raw_body), count_json_values(raw_body, MAX_JSON_VALUES))
    return await run(partial(dump_json, body, is_large=run is not run_in_turn))


async def read_chat(byte_count: int, work: Callable[[], Result]) -> Result:
    """Run a function that finds the question of a request of this size. Otherwise like `run_for_size`."""
    return await run_for_size(byte_count, work, MAX_INLINE_MESSAGES)


def make_logprobs_filter(request: Mapping[str, Any]) -> LogprobsFilter | None:
    """Return a function that removes the log-probabilities that only the gate requested. None means to keep all.

    Args:
        request: Body of the client's request.
    """
    if not request.get("logprobs"):
        return remove_logprobs
    count = request.get("top_logprobs")
    requested_count = count if isinstance(count, int) else 0
    if requested_count >= MIN_TOP_LOGPROBS:
        return None
    return partial(limit_top_logprobs, count=requested_count)


def remove_logprobs(completion: dict[str, Any]) -> None:
    """Set the log-probabilities of every choice of a chat completion to null, in place."""
    choices = completion.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and "logprobs" in choice:
            choice["logprobs"] = None


def limit_top_logprobs(completion: dict[str, Any], count: int) -> None:
    """Keep `count` alternatives of each token in the log-probabilities of a chat completion, in place."""
    choices = completion.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        logprobs = choice.get("logprobs") if isinstance(choice, dict) else None
        tokens = logprobs.get("content") if isinstance(logprobs, dict) else None
        for token in tokens if isinstance(tokens, list) else ():
            if isinstance(token, dict) and isinstance(token.get("top_logprobs"), list):
                token["top_logprobs"] = token["top_logprobs"][:count]


def cut_logprobs(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return a choice with the log-probabilities of the first tokens of its answer only, because gates read only these."""
    choice = drop_reasoning_logprobs(choice)
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return dict(choice)
    lists = {name: values[:MAX_ANSWER_CHARS] for name, values in logprobs.items() if isinstance(values, list)}
    return {**choice, "logprobs": {**logprobs, **lists}}


async def parse_completion(content: bytes) -> dict[str, Any]:
    """Parse a completion: a JSON object. Its `choices`, if any, must be a list.

    Raises:
        InvalidResponse: The response has another format.
    """
    value = await run_for_size(len(content), lambda: parse_upstream_json(content))
    if not isinstance(value, dict) or not isinstance(value.get("choices", []), list):
        raise InvalidResponse("the body is not a completion in the format of OpenAI's API")
    return value
