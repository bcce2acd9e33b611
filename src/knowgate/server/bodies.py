"""The door for requests: a body of bounded size and time becomes a JSON object, or a sentence with the right 4xx."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request

from knowgate.doors import parse_json
from knowgate.errors import BadInput
from knowgate.server.problems import Problem


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """All of it; what is too long is refused before it is read, where the client says how long it is."""
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said[:20]) > most:
        raise too_long(most)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise too_long(most)
    except TimeoutError:
        raise Problem(408, f"the request did not arrive within {seconds:g} seconds.", "request_timeout") from None
    except ClientDisconnect:
        raise Problem(400, "the client hung up before its request was there.") from None
    return bytes(body)


def read_object(body: bytes) -> dict[str, Any]:
    try:
        value = parse_json(body.decode(), "the request")
    except UnicodeDecodeError as error:
        raise Problem(400, f"the request is not UTF-8: byte {error.start} is part of no character.") from None
    except BadInput as error:
        raise Problem(400, str(error), "invalid_json") from None
    if not isinstance(value, dict):
        raise Problem(400, "the request is not a JSON object.", "invalid_json")
    return value


def too_long(most: int) -> Problem:
    return Problem(413, f"the request is longer than {most:,} bytes, which is the most this server reads.", "too_long")


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Problem(400, f"'{name}' must be true or false.", "invalid_type")
    return bool(value)
