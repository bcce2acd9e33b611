"""Log answered questions for the gates dhicl and skr, with a label that says whether the LLM knows the answer.

A retrieved question may have two answers: the draft (without passages) and the open-book answer (with passages). If
they agree, the question is labeled as known; otherwise as unknown. A question for which retrieval was skipped has one
answer only and is not logged; otherwise the gate would confirm its own decisions. Writing does not delay the answers.
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
    """Makes the model generate a complete answer without passages. It decides nothing: its score is always 0."""

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
        tenant: Name of the user or customer that the entries belong to.
        drafts: Also generate a complete answer without passages if the gate does not; otherwise such questions are not
            logged.

    Attributes:
        n_questions: Number of answered questions so far.
        n_labeled: Number of questions that got a label and were logged.

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
        """Label questions by whether their two answers agree, and log them in the background. Thread-safe.

        Questions that cannot be labeled are counted, but not logged.
        """
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
        """Write entries in the background. Thread-safe.

        Returns:
            A future that says whether the entries were written.
        """
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
    """The background thread that writes queued entries; None in the queue stops it.

    Errors are logged, not raised, so that a broken log does not stop the pipeline from answering.
    """

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
        """Write entries to the store and return whether that worked."""
        try:
            self.store.add(entries)
        except Exception as error:  # noqa: BLE001 - the thread must survive for later entries
            log.warning("Questions could not be logged: %s", error)
            return False
        return True


def label_by_agreement(answer: Answer, max_tokens: int) -> KnowledgeLabel | None:
    """Label a question as known if its answers with and without passages agree, else as unknown.

    Returns None if one of the two answers is missing, incomplete or empty.
    """
    draft = answer.draft
    if not answer.passages or draft is None or not is_complete_draft(draft, max_tokens):
        return None
    closed_book, open_book = (canonical_answer(text, answer.question) for text in (draft.text, answer.open_text))
    if not closed_book or not open_book:
        return None
    return KnowledgeLabel.KNOWN if closed_book == open_book else KnowledgeLabel.UNKNOWN
