"""JSON over HTTP: read request bodies, write responses, and report errors in the format of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from knowgate.core.options import describe_requirement
from knowgate.core.validation import parse_json
from knowgate.errors import BadInput

RequestType = TypeVar("RequestType", bound=BaseModel)
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
INVALID_FIELD_CODES = {
    "messages": "invalid_messages",
    "question": "invalid_question",
    "questions": "invalid_question",
    "query": "invalid_query",
    "documents": "invalid_documents",
    "knowgate": "policy",
    **dict.fromkeys(("id", "rating", "comment", "correction"), "invalid_feedback"),
}


class ApiError(Exception):
    """An error response: an HTTP status, a message for people and a code for programs."""

    def __init__(self, status: int, message: str, code: str = "", headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, Any]:
        error_type = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": error_type, "param": None, "code": self.code or None}}

    def to_response(self) -> Response:
        return json_response(self.to_json(), self.status, self.headers)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Serialize a pydantic model or plain data as an ASCII-only JSON response."""
    if isinstance(content, BaseModel):
        content = content.model_dump(mode="json", exclude_unset=True)
    body = json.dumps(content, separators=(",", ":")).encode()
    return Response(body, status, {"content-type": "application/json", **(headers or {})})


async def read_body(request: Request, *, max_bytes: int, timeout: float) -> bytes:
    """Read a request body.

    Raises:
        ApiError: 413 if the body is larger than `max_bytes`, 408 if it takes longer than `timeout` seconds.
    """
    too_large = ApiError(413, f"the request body is too large: at most {max_bytes:,} bytes are allowed.", "too_long")
    content_length = request.headers.get("content-length", "")
    if content_length.isdigit() and int(content_length[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the request body did not arrive within {timeout:g} seconds.", "request_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the client disconnected before it had sent the whole request.") from None
    return bytes(body)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse a request body that must be a JSON object."""
    try:
        value = parse_json(body.decode(), "the request")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the request body is not valid UTF-8: see byte {error.start}.") from None
    except BadInput as error:
        raise ApiError(400, str(error), "invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the request body is not a JSON object.", "invalid_json")
    return value


def parse_request(model: type[RequestType], body: Mapping[str, Any]) -> RequestType:
    """Validate a request body against its pydantic model.

    Raises:
        ApiError: 400 that names the first invalid field.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        detail = error.errors()[0]
        path = ".".join(str(part) for part in detail["loc"]) or "body"
        code = INVALID_FIELD_CODES.get(path.partition(".")[0], "invalid_type")
        raise ApiError(400, f"'{path[:80]}' is invalid: {describe_requirement(detail)}.", code) from None
