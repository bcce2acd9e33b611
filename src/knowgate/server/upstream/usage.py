"""Token usage of a request that needs several calls to the upstream, such as a discarded draft and the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from knowgate.core.text import estimate_tokens
from knowgate.server.json_api import LARGE_BODY_BYTES, dump_json
from knowgate.server.streaming import InvalidResponse, parse_event_data
from knowgate.server.telemetry.token_usage import TokenUsage
from knowgate.server.upstream.draft import UpstreamDraft
from knowgate.server.upstream.response_body import parse_upstream_json


def measure_draft(draft: UpstreamDraft, request: Mapping[str, Any]) -> TokenUsage:
    """Return the tokens of a draft that is not sent to the client.

    If the upstream has not reported them, as for a stream that was canceled, they are estimated.

    Args:
        draft: The draft.
        request: The request body that the upstream got.
    """
    usage = _find_usage(draft)
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    text = draft.completion.text if draft.completion is not None else ""
    return TokenUsage(
        prompt if isinstance(prompt, int) else round(estimate_tokens(json.dumps(request.get("messages")))),
        completion if isinstance(completion, int) else round(estimate_tokens(text)),
    )


def _find_usage(draft: UpstreamDraft) -> Mapping[str, Any]:
    """Return the usage that the upstream reported for a draft, or an empty object if it reported none."""
    chunks: list[Any] = [parse_event_data(line) for line in draft.lines if b'"usage"' in line]
    usages = [chunk.get("usage") for chunk in (*chunks, draft.body) if isinstance(chunk, dict)]
    return next((usage for usage in reversed(usages) if isinstance(usage, dict)), {})


def add_usage(content: bytes, extra_usage: TokenUsage) -> bytes:
    """Add the tokens of other calls to the usage in a JSON body. A body that is not a JSON object stays as it is."""
    try:
        body = parse_upstream_json(content)
    except InvalidResponse:
        return content
    if not isinstance(body, dict):
        return content
    extra_usage.add_to(body)
    return dump_json(body, is_large=len(content) > LARGE_BODY_BYTES)
