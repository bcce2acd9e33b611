"""Reads JSON request bodies, writes JSON responses, and reports errors in the format of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from knowgate.core.options import describe_requirement
from knowgate.core.validation import count_json_values, keep_object, parse_json
from knowgate.errors import BadInput

RequestType = TypeVar("RequestType", bound=BaseModel)
MAX_JSON_VALUES = 50_000  # maximum number of values in a request on which a gate decides
MAX_FORWARDED_VALUES = 1_000_000  # the same in a request that is forwarded without a decision
# A larger body is parsed in a thread, so that other requests do not wait for it, and its memory is reserved.
LARGE_BODY_BYTES = 64 << 10
BYTES_PER_VALUE = {b"{": 200, b"[": 90, b",": 64}  # of memory, for each object, array and further value
MAX_INLINE_VALUES = 5_000  # a body with more JSON values is parsed in a thread, too
MAX_FIELDS = 20  # of an object that rejects unknown fields
load_json = partial(json.loads, object_hook=keep_object)  # lets other threads run, unlike `json.loads`
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
    """An exception that the server turns into an error response.

    Args:
        status: HTTP status.
        message: Explanation for people.
        code: Identifier for programs, such as "invalid_api_key".
        headers: Additional response headers.
    """

    def __init__(self, status: int, message: str, code: str = "", headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, Any]:
        """Return the response body in the format of OpenAI's API."""
        default_type = "invalid_request_error" if self.status < 500 else "server_error"
        error_type = ERROR_TYPES.get(self.status, default_type)
        return {"error": {"message": str(self), "type": error_type, "param": None, "code": self.code or None}}

    def to_response(self) -> Response:
        return json_response(self.to_json(), self.status, self.headers)


def make_missing_error(component: str, option: str, code: str) -> ApiError:
    """Return the error for a component that this server does not have.

    Args:
        component: The missing component, with "no": "no reranker".
        option: Option of `knowgate serve` that enables the component.
        code: Identifier of the error for programs.
    """
    fix = f"Its operator can set the option `{option}` of `knowgate serve` and restart it."
    return ApiError(404, f"this server has {component}. {fix}", code)


def make_unknown_decision_error(id: str) -> ApiError:
    """Return the error for an unknown decision. Decisions of other API keys count as unknown."""
    message = (
        f"the decision log has no decision '{id[:80]}' of this API key. Send the header x-knowgate-id of one of its "
        "responses. Decisions are deleted after a while."
    )
    return ApiError(404, message, "no_decision")


def dump_json(value: Any, *, is_large: bool = False) -> bytes:
    """Write compact JSON. Non-ASCII characters are escaped. NaN and infinity become null.

    Args:
        value: The value.
        is_large: Whether to write it in small steps, so that other threads can run meanwhile. This takes longer.
    """
    encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
    try:
        text = "".join(encoder.iterencode(value)) if is_large else encoder.encode(value)
    except ValueError:  # a number such as 1e400 was read as infinity, which clients cannot parse
        return dump_json(json.loads(json.dumps(value), parse_constant=lambda name: None), is_large=is_large)
    return text.encode()


def replace_non_finite(content: bytes) -> bytes:
    """Replace NaN and infinity in JSON by null. Clients cannot parse them."""
    if b"NaN" not in content and b"Infinity" not in content:
        return content
    try:
        return dump_json(load_json(content, parse_constant=lambda name: None), is_large=True)
    except ValueError:
        return content


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response for a pydantic model or plain data. Unset fields of a model are omitted."""
    if isinstance(content, BaseModel):
        content = content.model_dump(mode="json", exclude_unset=True)
    return Response(dump_json(content), status, {"content-type": "application/json", **(headers or {})})


def free_body(request: Request) -> int:
    """Free the received body of a request that was parsed and may wait for long. Return its size in bytes."""
    size = len(request.state.body)
    request.state.body = b""
    return size


async def read_body(
    request: Request, *, max_bytes: int, timeout: float, reserve: Callable[[int], None] = lambda size: None
) -> bytes:
    """Read the whole body of a request.

    Args:
        request: The request.
        max_bytes: Maximum size of the body.
        timeout: Maximum seconds until the whole body has arrived.
        reserve: Reserves memory for a large body: called with the size of each part that arrives after the first
            `LARGE_BODY_BYTES`, and at the end with minus the total, which frees the memory. It can raise an ApiError to
            reject the request.

    Raises:
        ApiError: 413 if the body is larger than `max_bytes`, 408 if it takes longer than `timeout` seconds, 400 if the
            client disconnects.
    """
    content_length = request.headers.get("content-length", "")
    # Only the first digits are read, because `int` rejects numbers of more than 4300 digits.
    if content_length.isdigit() and int(content_length[:20]) > max_bytes:
        raise _make_size_error(max_bytes)
    body = bytearray()
    reserved_bytes = 0
    try:
        async with asyncio.timeout(timeout):
            async for chunk in request.stream():
                if len(body) + len(chunk) > max_bytes:
                    raise _make_size_error(max_bytes)
                large_bytes = max(0, len(body) + len(chunk) - LARGE_BODY_BYTES)
                if large_bytes:
                    reserve(large_bytes - reserved_bytes)
                    reserved_bytes = large_bytes
                body += chunk
    except TimeoutError:
        raise ApiError(408, f"the request body did not arrive within {timeout:g} seconds.", "request_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the client disconnected before the whole request had arrived.") from None
    finally:
        if reserved_bytes:
            reserve(-reserved_bytes)
    return bytes(body)


def _make_size_error(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request body is too large. The maximum is {max_bytes:,} bytes.", "too_long")


def is_large(body: bytes) -> bool:
    """Return whether parsing a body takes so long that it must not delay other requests."""
    return len(body) > LARGE_BODY_BYTES or count_json_values(body, MAX_INLINE_VALUES) > MAX_INLINE_VALUES


def estimate_memory(body: bytes) -> int:
    """Return how many bytes a body takes at most, with the object parsed from it, and the body to forward if it changes."""
    char_bytes = 1 if body.isascii() and b"\\u" not in body else 4  # as many as the widest character of a text needs
    # In the body to forward, other characters than those of ASCII are escaped, and so is DEL.
    copy_bytes = len(body) * (1 if body.isascii() else 3) + 5 * body.count(b"\x7f")
    return (
        len(body) * (1 + char_bytes)
        + copy_bytes
        + sum(size * body.count(mark) for mark, size in BYTES_PER_VALUE.items())
    )


def parse_json_object(body: bytes, max_values: int = MAX_JSON_VALUES) -> dict[str, Any]:
    """Parse a request body that must be a JSON object.

    Raises:
        ApiError: 400 if the body is not valid UTF-8, not valid JSON, or not an object. 413 if it has more than
            `max_values` values, which would take too long to process.
    """
    if count_json_values(body, max_values) > max_values:
        raise ApiError(413, f"the request body has more than {max_values:,} JSON values.", "too_long")
    # Objects and arrays take ten times as long to parse as the numbers of tokens.
    if max_values > MAX_JSON_VALUES and count_json_values(body, MAX_JSON_VALUES, (b"{", b"[")) > MAX_JSON_VALUES:
        raise ApiError(413, f"the request body has more than {MAX_JSON_VALUES:,} JSON objects and arrays.", "too_long")
    try:
        value = parse_json(body.decode(), "the request")
    except UnicodeDecodeError as error:
        message = f"the request body is not valid UTF-8. The first invalid byte is at position {error.start}."
        raise ApiError(400, message) from None
    except BadInput as error:
        raise ApiError(400, str(error), "invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the request body must be a JSON object.", "invalid_json")
    return value


def _check_field_count(value: Any) -> Any:
    """Reject an object with many fields. Otherwise an error would be built for each unknown one."""
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ValueError(f"the object has more than {MAX_FIELDS} fields")
    return value


FieldLimit = BeforeValidator(_check_field_count)


def parse_request(model: type[RequestType], body: Mapping[str, Any]) -> RequestType:
    """Validate a request body against its pydantic model.

    Raises:
        ApiError: 400 if a field is invalid. The message names the first one.
    """
    if model.model_config.get("extra") == "forbid" and len(body) > MAX_FIELDS:  # building an error for each takes long
        raise ApiError(400, f"the request body has more than {MAX_FIELDS} fields.", "invalid_type")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in detail["loc"]) or "body"
        code = INVALID_FIELD_CODES.get(path.partition(".")[0], "invalid_type")
        raise ApiError(400, f"'{path[:80]}' is invalid: {describe_requirement(detail)}.", code) from None
