"""Log answered questions for the gates dhicl and skr, with a label that says whether the LLM knows the answer.

A retrieved question may have two answers: the draft (without passages) and the open-book answer (with passages). If
they agree, the question is labeled as known; otherwise as unknown. A question for which retrieval was skipped has one
answer only and is not logged; otherwise the gate would confirm its own decisions. Writing does not delay the answers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from knowgate.data.history import open_history
from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LabelSource, LogEntry
from knowgate.data.history.store import HistoryStore
from knowgate.data.signals.samples import canonical_answer
from knowgate.errors import get_brief
from knowgate.models.fair_executor import TurnQueue
from knowgate.pipeline.question_state import is_complete_draft
from knowgate.types import Answer, Gate, Question, Reading, Signal, SignalRequest

MAX_WAITING = 1_000  # calls of `log_entries` of one client whose entries wait; those of further calls are lost
CLOSE_SECONDS = 5.0  # a server that ends writes entries for this time
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompleteDraftGate(Gate):
    """Helper gate that lets the LLM write a draft for the log or the arbiter, and decides nothing.

    A draft is an answer without passages. Its maximum length is `max_tokens`.
    """

    max_tokens: int = 32
    needs = frozenset({Signal.DRAFT})

    @property
    def request(self) -> SignalRequest:
        """The signals to read: a draft of `max_tokens`."""
        return SignalRequest(draft_tokens=self.max_tokens)

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Return 0 for every question, because this gate decides nothing."""
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
        n_lost: Number of labeled questions that could not be written.

    Example:
        >>> rag = AdaptiveRAG(model, gate, retriever, log=TrafficLog("history.db"))  # doctest: +SKIP
    """

    def __init__(self, store: str | HistoryStore, *, tenant: str = "", drafts: bool = False):
        self.store = open_history(store) if isinstance(store, str) else store
        self.tenant = tenant
        self.drafts = drafts
        self.n_questions = 0
        self.n_labeled = 0
        self.n_lost = 0
        self._lock = threading.Lock()
        self._writing_lock = threading.Lock()  # acquired before `_lock`
        self._waiting: TurnQueue[tuple[list[LogEntry], Future[bool]]] = TurnQueue()  # in which clients take turns
        self._last_reason = ""  # why the last entries were lost
        self._deadline = math.inf  # after this time, as in `time.monotonic`, entries are lost
        self._writer = ThreadPoolExecutor(1, "knowgate-log")  # starts its thread at the first entry

    @property
    def problem(self) -> str:
        """What is wrong with writing the log, or "" if nothing is."""
        return f"{self.n_lost} labels could not be written to the history" if self.n_lost else ""

    def load_embedder(self) -> None:
        """Load the embedding model now, before the first entry needs it."""
        try:
            self.store.embed(["warm-up"])
        except Exception as error:  # noqa: BLE001 - the pipeline can answer without logging
            log.warning("Questions cannot be logged: %s", error)

    def log_answers(self, answers: Sequence[Answer], scope: HistoryScope, max_tokens: int) -> None:
        """Log questions, labeled as known if both answers agree. Questions without two answers are only counted.

        Args:
            answers: The answers.
            scope: LLM, prompts and tenant under which the questions are logged.
            max_tokens: Maximum length of an answer, to recognize incomplete ones.
        """
        entries = []
        for answer in answers:
            label = label_by_agreement(answer, max_tokens)
            if label is not None:
                entries.append(LogEntry(answer.question.text, label, scope, LabelSource.AGREEMENT))
        with self._lock:
            self.n_questions += len(answers)
        if entries:
            self.log_entries(entries)

    def log_entries(self, entries: Sequence[LogEntry]) -> Future[bool]:
        """Write entries to the history in a background thread, and return at once. Thread-safe.

        Returns:
            A future that says whether the entries were written.
        """
        future: Future[bool] = Future()
        with self._lock:
            self.n_labeled += len(entries)
            is_full = self._waiting.count_own() >= MAX_WAITING
            if not is_full:
                self._waiting.append((list(entries), future))
        if is_full:
            self._count_loss(entries, "too many are waiting to be written")
            future.set_result(False)
        else:
            self._writer.submit(self._write_next)
        return future

    def _write_next(self) -> None:
        """Write the entries of the client whose turn it is."""
        with self._lock:
            client = self._waiting.find_client()
            assert client is not None  # this function is called once for each item of the queue
            entries, future = self._waiting.peek(client)
        if time.monotonic() < self._deadline:
            future.set_result(self._write(entries))
        else:
            self._count_loss(entries, "the process ends, and the embedding model or the history is slow")
            future.set_result(False)
        with self._lock:
            self._waiting.popleft(client)

    def _write(self, entries: list[LogEntry]) -> bool:
        """Write entries to the history, and return whether that worked. Errors are logged and counted, not raised.

        Entries that `drop_waiting` removes from the list meanwhile are not written.
        """
        embedded = list(entries)
        if not embedded:
            return False
        try:
            vectors = self.store.embed([entry.question for entry in embedded])
            with self._writing_lock:
                kept = [index for index, entry in enumerate(embedded) if entry in entries]
                self.store.add([embedded[index] for index in kept], vectors[kept])
        except Exception as error:  # noqa: BLE001 - a broken log does not stop the pipeline from answering
            self._count_loss(entries, get_brief(error))
            return False
        self._last_reason = ""
        return bool(kept)

    def _count_loss(self, entries: Sequence[LogEntry], reason: str) -> None:
        """Count entries that could not be written. Of equal reasons in a row, only the first is logged."""
        with self._lock:
            self.n_lost += len(entries)
            is_new = reason != self._last_reason
            self._last_reason = reason
        if is_new:
            log.warning("Questions could not be logged: %s", reason)

    def flush(self) -> None:
        """Wait until all entries that were logged before this call are written."""
        with self._lock:
            futures = [future for _, future in self._waiting]
        wait(futures)

    def is_waiting(self, key: str) -> bool:
        """Return whether an entry on a question is not yet written. `key` is the hash of the question."""
        with self._lock:
            entries = [entry for waiting, _ in self._waiting for entry in waiting]
        return key in {entry.key for entry in entries}  # not under the lock, because hashing long questions takes time

    def drop_waiting(self, key: str) -> int:
        """Remove the entries on a question that are not yet written, and return their number.

        An embedding server can delay entries for long, so a deletion does not wait until they are written.
        """
        if not self.is_waiting(key):  # from now on, the hashes are known
            return 0
        with self._writing_lock, self._lock:
            n_dropped = 0
            for entries, _ in self._waiting:
                kept = [entry for entry in entries if entry.key != key]
                n_dropped += len(entries) - len(kept)
                entries[:] = kept
            return n_dropped

    def close(self, seconds: float = math.inf) -> None:
        """Wait until all entries are written, and close the connection. The log can still be used afterwards.

        Args:
            seconds: After this time, no further entry is written, and those that wait are lost.
        """
        self._deadline = time.monotonic() + seconds
        self._writer.submit(close_connection, self.store).result()
        self._deadline = math.inf


def close_connection(store: HistoryStore) -> None:
    """Close this thread's connection to a history in an SQLite file. Other histories share connections."""
    from knowgate.data.history.sqlite_store import SqliteHistory

    if isinstance(store, SqliteHistory):
        store.close()


def label_by_agreement(answer: Answer, max_tokens: int) -> KnowledgeLabel | None:
    """Label a question as known if both answers agree, else as unknown.

    Args:
        answer: The answer with passages, and its draft: the answer without passages.
        max_tokens: Maximum length of an answer. A shorter draft that did not end by itself is incomplete.

    Returns:
        The label; None if one of the two answers is missing, incomplete or empty.
    """
    draft = answer.draft
    if not answer.passages or draft is None or not is_complete_draft(draft, max_tokens):
        return None
    closed_book = canonical_answer(draft.text, answer.question)
    open_book = canonical_answer(answer.open_text, answer.question)
    if not closed_book or not open_book:
        return None
    return KnowledgeLabel.KNOWN if closed_book == open_book else KnowledgeLabel.UNKNOWN
