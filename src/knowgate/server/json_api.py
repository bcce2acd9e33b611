"""What a request is refused with: a status and a sentence, in the form that OpenAI's clients read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from knowgate.core.validation import parse_json
from knowgate.errors import BadInput

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Ends a request. code: a word for programs."""

    def __init__(self, status: int, message: str, code: str = "", headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})

    @property
    def record(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code or None}}

    @property
    def response(self) -> Response:
        return json_response(self.record, self.status, self.headers)


def json_response(record: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """ASCII escapes: whatever the text holds can be sent."""
    content = json.dumps(record, separators=(",", ":")).encode()
    return Response(content, status, {"content-type": "application/json", **(headers or {})})


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """All of it; what is too long is refused before it is read, where the client says how long it is."""
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said[:20]) > most:
        raise body_too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise body_too_large(most)
    except TimeoutError:
        raise ApiError(408, f"the request did not arrive within {seconds:g} seconds.", "request_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the client hung up before its request was there.") from None
    return bytes(body)


def parse_json_object(body: bytes) -> dict[str, Any]:
    try:
        value = parse_json(body.decode(), "the request")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the request is not UTF-8: byte {error.start} is part of no character.") from None
    except BadInput as error:
        raise ApiError(400, str(error), "invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the request is not a JSON object.", "invalid_json")
    return value


def body_too_large(most: int) -> ApiError:
    return ApiError(413, f"the request is longer than {most:,} bytes, which is the most this server reads.", "too_long")


def read_bool(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"'{name}' must be true or false.", "invalid_type")
    return bool(value)
