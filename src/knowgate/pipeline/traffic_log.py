"""Log answered questions with a weak label for the gates dhicl and skr, without delaying the answers.

A retrieved question with a complete draft has two answers: closed-book and open-book. If they agree, the LLM knows the
answer; otherwise it does not. A skipped question has one answer only and is not logged, so that a skip never labels
itself.
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
    """A reader that requests the complete closed-book answer; its score is not used."""

    max_tokens: int = 32
    needs = frozenset({Signal.DRAFT})

    @property
    def request(self) -> SignalRequest:
        """The signals to read: a draft of `max_tokens`."""
        return SignalRequest(draft_tokens=self.max_tokens)

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Return zeros."""
        return [0.0 for _ in questions]


class TrafficLog:
    """A log of answered questions for `AdaptiveRAG`. A background thread embeds and writes the entries.

    Args:
        store: An opened history, or the path or address of one.
        tenant: Name under which the entries are stored.
        drafts: Also generate the closed-book answer if the gate reads none; otherwise such questions get no label.

    Attributes:
        n_questions: Answers seen.
        n_labeled: Entries logged.

    Example:
        >>> rag = AdaptiveRAG(model, gate, retriever, log=TrafficLog("history.db"))  # doctest: +SKIP
    """

    def __init__(self, store: str | HistoryStore, *, tenant: str = "", drafts: bool = False):
        self.store = open_history(store) if isinstance(store, str) else store
        self.tenant = tenant
        self.drafts = drafts
        self.n_questions = 0
        self.n_labeled = 0
        self._writer: LogWriter | None = None
        self._lock = threading.Lock()

    def log_answers(self, answers: Sequence[Answer], scope: HistoryScope, max_tokens: int) -> None:
        """Label answers by agreement and log them in the background. Thread-safe."""
        labels = [(answer, label_by_agreement(answer, max_tokens)) for answer in answers]
        entries = [
            LogEntry(answer.question.text, label, scope, LabelSource.AGREEMENT)
            for answer, label in labels
            if label is not None
        ]
        with self._lock:
            self.n_questions += len(answers)
        self.log_entries(entries)

    def log_entries(self, entries: Sequence[LogEntry]) -> Future[bool]:
        """Log labeled entries in the background; the future holds whether they were written. Thread-safe."""
        written: Future[bool] = Future()
        if not entries:
            written.set_result(True)
            return written
        with self._lock:
            self.n_labeled += len(entries)
            if self._writer is None:
                self._writer = LogWriter(self.store)
                self._writer.start()
                atexit.register(self.close)
            self._writer.queue.put((list(entries), written))
        return written

    def close(self) -> None:
        """Wait until all entries are written. The log can still be used afterwards."""
        with self._lock:
            writer, self._writer = self._writer, None
        if writer is not None:
            atexit.unregister(self.close)
            writer.queue.put(None)
            writer.join()


class LogWriter(threading.Thread):
    """Writes queued entries until it gets None. Failures are logged, not raised: answers matter more than labels."""

    def __init__(self, store: HistoryStore):
        super().__init__(name="knowgate-log", daemon=True)
        self.store = store
        self.queue: queue.SimpleQueue[tuple[list[LogEntry], Future[bool]] | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Write entries until None arrives."""
        while (item := self.queue.get()) is not None:
            entries, written = item
            written.set_result(self._write(entries))

    def _write(self, entries: list[LogEntry]) -> bool:
        try:
            self.store.add(entries)
        except Exception as error:  # noqa: BLE001 - the thread must survive for later entries
            log.warning("Questions could not be logged: %s", error)
            return False
        return True


def label_by_agreement(answer: Answer, max_tokens: int) -> KnowledgeLabel | None:
    """Label a question as known if its two answers agree; None if it lacks a complete draft or an answer."""
    draft = answer.draft
    if not answer.passages or draft is None or not is_complete_draft(draft, max_tokens):
        return None
    closed_book, open_book = (canonical_answer(text, answer.question) for text in (draft.text, answer.open_text))
    if not closed_book or not open_book:
        return None
    return KnowledgeLabel.KNOWN if closed_book == open_book else KnowledgeLabel.UNKNOWN
