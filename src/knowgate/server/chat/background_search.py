"""Searches that run in the background, while the upstream generates a draft."""

from __future__ import annotations

import asyncio

from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.server.chat.gate_service import GateService
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.types import Passage, Question


class BackgroundSearch:
    """A search that runs in the background.

    Its timings and failures are added to the trace of the request only if its passages are used.
    """

    def __init__(self, gate_service: GateService, rag: AdaptiveRAG, question: Question):
        self._trace = RequestTrace()
        self._task = asyncio.ensure_future(gate_service.search(rag, question, self._trace))

    async def get_passages(self, trace: RequestTrace) -> tuple[Passage, ...]:
        """Wait for the passages, and add the timings and failures of the search to the trace of the request."""
        try:
            return await self._task
        finally:
            self.cancel()
            trace.degraded += self._trace.degraded
            trace.milliseconds |= self._trace.milliseconds
            trace.stages += self._trace.stages

    def cancel(self) -> None:
        """Cancel the search if it still runs."""
        self._task.cancel()
        # Asyncio logs exceptions of tasks that nobody reads, so read the exception here.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
