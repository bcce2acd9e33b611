"""A request that is forwarded to the upstream, and a search that runs meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.server.chat.gate_service import GateService
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.server.upstream.draft import UpstreamDraft
from knowgate.server.upstream.response_body import write_request
from knowgate.types import Passage, Question


@dataclass
class ForwardedRequest:
    """A request that is forwarded to the upstream.

    Attributes:
        body: Body of the client's request.
        raw_body: The same body as bytes, which are forwarded if the body is not changed.
        headers: Headers of the client's request.
        trace: Trace of the request.
        deadline: Time of the event loop's clock at which a streamed response must have ended.
        changed_body: The body to forward, if it differs from that of the client.
        draft: The answer without passages, if the gate read it and decided to retrieve. It can still be sent if the
            search returns nothing, or if an arbiter prefers it to the answer with passages.
    """

    body: dict[str, Any]
    raw_body: bytes
    headers: Headers
    trace: RequestTrace
    deadline: float = 0.0
    changed_body: dict[str, Any] | None = None
    draft: UpstreamDraft | None = None

    @property
    def upstream_body(self) -> dict[str, Any]:
        """The body to forward."""
        return self.body if self.changed_body is None else self.changed_body

    async def write_content(self) -> bytes:
        """Return the body to forward, as bytes."""
        if self.changed_body is None:
            return self.raw_body
        return await write_request(self.changed_body, self.raw_body)

    @property
    def is_streaming(self) -> bool:
        return bool(self.body.get("stream"))


class BackgroundSearch:
    """Search in the background. The trace of the request shows the search only if its passages are used."""

    def __init__(self, gate_service: GateService, rag: AdaptiveRAG, question: Question):
        self._trace = RequestTrace()
        self._task = asyncio.ensure_future(gate_service.search(rag, question, self._trace))

    async def get_passages(self, trace: RequestTrace) -> tuple[Passage, ...]:
        """Wait for the passages. Add timings and failures of the search to the trace."""
        try:
            return await self._task
        finally:
            self.cancel()  # does nothing unless the request itself was cancelled while it waited
            trace.degraded += self._trace.degraded
            trace.milliseconds |= self._trace.milliseconds
            trace.stages += self._trace.stages
            del self._task  # its error refers to this frame, so the memory of the request could not be freed at once

    def cancel(self) -> None:
        """Cancel the search if it still runs."""
        self._task.cancel()
        # Asyncio logs exceptions of tasks that nobody reads, so read the exception here.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
