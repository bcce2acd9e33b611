"""An upstream's reply on its way to the client, whole or event by event, with what we have to say put into it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import aiohttp
from aiohttp.client_exceptions import ClientError
from starlette.responses import Response

from knowgate.server.events import ENDS, Amending, StreamTooLong, chained, event
from knowgate.server.problems import Problem
from knowgate.server.trace import Trace
from knowgate.server.upstream import headers_of, unreachable


async def whole(reply: aiohttp.ClientResponse, trace: Trace, *, tells: bool = True) -> Response:
    """A reply in one piece: good ones with our record, errors just as they came. tells: not in its body, if False."""
    async with reply:
        try:
            content = await reply.read()
        except (ClientError, OSError) as error:
            raise unreachable(error) from None
    content = with_record(content, trace) if reply.status == 200 and tells else content
    return Response(content, reply.status, headers_of(reply, trace.headers))


def with_record(content: bytes, trace: Trace) -> bytes:
    """A JSON object with one field more; its own bytes stay as they are."""
    text = content.strip()
    if not (text.startswith(b"{") and text.endswith(b"}")):
        return content
    comma = b"," if text[1:-1].strip() else b""
    return text[:-1] + comma + b'"knowgate":' + json.dumps(trace.record, separators=(",", ":")).encode() + b"}"


async def passed(
    reply: aiohttp.ClientResponse, amending: Amending | None, begun: list[bytes], rest: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """The upstream's stream, amended, event by event; when nobody listens any more the upstream is hung up on."""
    waiting = b""
    try:
        async for line in chained(begun, rest):
            waiting += amending.amend(line) if amending else line
            if line in ENDS:
                yield waiting
                waiting = b""
        if waiting:
            yield waiting
    except (ClientError, OSError, StreamTooLong):
        yield event(Problem(502, "the upstream broke off in the middle of its answer.", "upstream_broke_off").record)
    finally:
        await rest.aclose()
        reply.close()
