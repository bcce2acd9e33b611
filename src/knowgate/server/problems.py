"""What a request is refused with: a status and a sentence, in the form that OpenAI's clients read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Problem(Exception):
    """Ends a request. code: a word for programs."""

    def __init__(self, status: int, message: str, code: str = "", headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})

    @property
    def record(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code or None}}

    @property
    def response(self) -> Response:
        return json_response(self.record, self.status, self.headers)


def json_response(record: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """ASCII escapes: whatever the text holds can be sent."""
    content = json.dumps(record, separators=(",", ":")).encode()
    return Response(content, status, {"content-type": "application/json", **(headers or {})})
