"""What was asked goes into the log that dhicl and skr learn from, beside the answering and never in its way.

A question that was retrieved for has two answers where its draft is whole: from memory and with passages. If they
agree, the LLM knows it (a weak label); if not, it does not. A question that was skipped has one answer only and is not
logged: a skip never labels itself.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from knowgate.data.history import open_history
from knowgate.data.history.entries import HistoryScope, HistoryStore, KnowledgeLabel, LabelSource, LogEntry
from knowgate.data.signals.samples import canonical_answer
from knowgate.pipeline.question_state import is_complete_draft
from knowgate.types import Answer, Gate, Question, Reading, Signal, SignalRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompleteDraftGate(Gate):
    """Scores nothing: read beside a gate, it makes sure that there is a closed-book answer to compare with."""

    max_tokens: int = 32
    needs = frozenset({Signal.DRAFT})

    @property
    def request(self) -> SignalRequest:
        return SignalRequest(draft_tokens=self.max_tokens)

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [0.0 for _ in questions]


class TrafficLog:
    """A log that `AdaptiveRAG` writes to. A thread of its own embeds and writes; `close` waits for it.

    drafts: also draft the closed-book answer where the gate reads none; otherwise such questions get no label.

    Example:
        >>> rag = AdaptiveRAG(model, gate, retriever, log=TrafficLog("history.db"))  # doctest: +SKIP
    """

    def __init__(self, store: str | HistoryStore, *, tenant: str = "", drafts: bool = False):
        self.store = open_history(store) if isinstance(store, str) else store
        self.tenant = tenant
        self.drafts = drafts
        self.asked = 0
        self.labelled = 0
        self._writer: LogWriter | None = None
        self._lock = threading.Lock()

    def take(self, answers: Sequence[Answer], scope: HistoryScope, max_tokens: int) -> None:
        """Log what these answers tell; returns at once. Safe to call from several threads."""
        labels = [(answer, label_by_agreement(answer, max_tokens)) for answer in answers]
        entries = [
            LogEntry(answer.question.text, label, scope, LabelSource.AGREEMENT)
            for answer, label in labels
            if label is not None
        ]
        with self._lock:
            self.asked += len(answers)
        self.put(entries)

    def put(self, entries: Sequence[LogEntry]) -> Future[bool]:
        """Log labels that others worked out; returns at once. True, later: they are on disk; False: they failed."""
        written: Future[bool] = Future()
        if not entries:
            written.set_result(True)
        with self._lock:
            self.labelled += len(entries)
            if entries and self._writer is None:
                self._writer = LogWriter(self.store)
                self._writer.start()
                atexit.register(self.close)
            if entries and self._writer is not None:
                self._writer.waiting.put((list(entries), written))
        return written

    def close(self) -> None:
        """Until everything is written. The log can still be used."""
        with self._lock:
            writer, self._writer = self._writer, None
        if writer is not None:
            atexit.unregister(self.close)
            writer.waiting.put(None)
            writer.join()


class LogWriter(threading.Thread):
    """Writes what waits until None comes. A label is worth less than an answer: failure is said, not raised."""

    def __init__(self, store: HistoryStore):
        super().__init__(name="knowgate-log", daemon=True)
        self.store = store
        self.waiting: queue.SimpleQueue[tuple[list[LogEntry], Future[bool]] | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (waiting := self.waiting.get()) is not None:
            entries, written = waiting
            written.set_result(self._write(entries))

    def _write(self, entries: list[LogEntry]) -> bool:
        try:
            self.store.add(entries)
        except Exception as error:  # noqa: BLE001 - the thread must live on for those that come
            log.warning("What was asked could not be logged: %s", error)
            return False
        return True


def label_by_agreement(answer: Answer, max_tokens: int) -> KnowledgeLabel | None:
    """What the two answers say about the LLM; None unless it gave both, whole."""
    draft = answer.draft
    if not answer.passages or draft is None or not is_complete_draft(draft, max_tokens):
        return None
    closed, opened = (canonical_answer(text, answer.question) for text in (draft.text, answer.open_text))
    if not closed or not opened:
        return None
    return KnowledgeLabel.KNOWN if closed == opened else KnowledgeLabel.UNKNOWN
