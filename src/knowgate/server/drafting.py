"""The upstream's answer to the request itself, read as a draft: all of it, or as much of a stream as the gate reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp.client_exceptions import ClientError

from knowgate.errors import ModelError
from knowgate.models import GatheredReply, read_choices
from knowgate.server.events import StreamTooLong, data_of, hide_logprobs, lines
from knowgate.types import Arbiter, Completion, Gate, Signal

TOP = 2  # the margin needs two
SECONDS = 2.0  # between the end of an answer and that of its stream


@dataclass
class Drafted:
    """What came: `content` of a reply in one piece; of a stream the `lines` so far and the `rest`.

    completion: None where it could not be read. hides_logprobs: they were asked for by us, not by the client.
    ended: of a stream, that the answer came to its end.
    """

    reply: aiohttp.ClientResponse
    completion: Completion | None = None
    called_tool: bool = False
    content: bytes = b""
    lines: list[bytes] = field(default_factory=list)
    rest: AsyncGenerator[bytes, None] | None = None
    hides_logprobs: bool = False
    ended: bool = False

    async def read_on(self) -> None:
        """What comes after the end of an answer (usage, [DONE]), so that it could be the reply."""
        assert self.rest is not None
        try:
            async with asyncio.timeout(SECONDS):
                self.lines += [line async for line in self.rest]
        except (ClientError, OSError, StreamTooLong, TimeoutError):
            self.ended = False

    @property
    def is_whole(self) -> bool:
        """It could be the reply: all of it is here."""
        return self.rest is None or (self.ended and self.completion is not None and self.completion.finished)

    def close(self) -> None:
        """Hang up: what is left of the draft is not wanted."""
        self.reply.close()

    @property
    def shown(self) -> bytes:
        """A reply in one piece as the client may see it."""
        if not self.hides_logprobs:
            return self.content
        reply = json.loads(self.content)
        hide_logprobs(reply)
        return json.dumps(reply, separators=(",", ":")).encode()


def draft_request(request: dict[str, Any], reader: Gate | Arbiter) -> dict[str, Any]:
    """The request, asking for what the gate or arbiter reads as well."""
    if Signal.LOGPROBS not in reader.needs:
        return request
    top = request.get("top_logprobs")
    return {**request, "logprobs": True, "top_logprobs": max(TOP, top) if isinstance(top, int) else TOP}


async def read_plain_draft(reply: aiohttp.ClientResponse) -> Drafted:
    async with reply:
        content = await reply.read()
    try:
        record = json.loads(content)
        completion = read_choices(record)[0]
    except (ValueError, ModelError):
        return Drafted(reply, content=content)
    message = record["choices"][0].get("message")
    return Drafted(reply, completion, isinstance(message, dict) and bool(message.get("tool_calls")), content)


async def read_streamed_draft(reply: aiohttp.ClientResponse, tokens: int) -> Drafted:
    """Until there are so many tokens, or the end."""
    return await read_streamed(reply, lambda gathered: _count(gathered) >= tokens)


async def read_held_back(reply: aiohttp.ClientResponse, lets_out: Callable[[str], bool]) -> Drafted:
    """Until its beginning may be let out, or the end."""
    return await read_streamed(reply, lambda gathered: lets_out("".join(gathered.texts)))


async def read_streamed(reply: aiohttp.ClientResponse, is_enough: Callable[[GatheredReply], bool]) -> Drafted:
    found = Drafted(reply, rest=lines(reply.content.iter_any()))
    gathered = GatheredReply()
    assert found.rest is not None
    async for line in found.rest:
        found.lines.append(line)
        chunk = data_of(line)
        if chunk is None:
            continue
        if _calls_tool(chunk):
            found.called_tool = True
            return found
        try:
            gathered.add(chunk)
        except ModelError:
            return found
        if gathered.finish is not None or is_enough(gathered):
            break
    found.ended = gathered.finish is not None
    choice = {"text": "".join(gathered.texts), "finish_reason": gathered.finish or "length"}
    try:
        (found.completion,) = read_choices({"choices": [{**choice, "logprobs": gathered.logprobs or None}]})
    except ModelError:
        found.completion = None
    return found


def _count(gathered: GatheredReply) -> int:
    """Tokens so far; pieces of text where the server does not say."""
    listed = gathered.logprobs.get("content")
    return len(listed) if listed is not None else sum(bool(text) for text in gathered.texts)


def _calls_tool(chunk: dict[str, Any]) -> bool:
    choices = chunk.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    delta = first.get("delta")
    return isinstance(delta, dict) and bool(delta.get("tool_calls"))
