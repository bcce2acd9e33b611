"""Labels go into the history, under the LLM and the wording they are about. Beside the requests, never in their way."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass

from knowgate.errors import KnowgateError
from knowgate.history import Known, LogEntry, Scope, Source
from knowgate.pipeline import AdaptiveRAG, TrafficLog

log = logging.getLogger(__name__)


@dataclass
class Labelling:
    """history: None where none is kept; then nothing happens."""

    rag: AdaptiveRAG
    history: TrafficLog | None = None

    def put(self, question: str, label: Known, source: Source) -> Future[bool] | None:
        """Returns at once. True, later: it is on disk. None where nothing is kept."""
        if self.history is None:
            return None
        scope = Scope(self.rag.model.fingerprint, self.rag.prompts.fingerprint, self.history.tenant)
        try:
            return self.history.put([LogEntry(question, label, scope, source)])
        except KnowgateError as error:
            log.warning("A label could not be logged: %s", error)
            return None
