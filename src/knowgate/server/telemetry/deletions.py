"""Finds and deletes the decisions on a question in the tables of the decision log."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from knowgate.core.text import normalize
from knowgate.data.history.entries import question_key
from knowgate.server.database import WRITE_LOCK, Store

SELECT_DELETIONS = "SELECT at, decision, question_key, owner FROM deletions WHERE at >= ? ORDER BY at"
# Three queries that use an index each. For a condition with OR, PostgreSQL would read all decisions.
SELECT_DECISIONS = (
    "SELECT id, owner FROM decisions WHERE id = ? UNION SELECT id, owner FROM decisions WHERE question_key = ? "
    "UNION SELECT id, owner FROM decisions WHERE id IN (SELECT decision FROM source_questions WHERE question_key = ?)"
)
DELETE_OLD_DELETIONS = (  # some at a time, because other writers wait for it
    "DELETE FROM deletions WHERE at < ? "
    "AND at <= (SELECT MAX(at) FROM (SELECT at FROM deletions ORDER BY at LIMIT ?) AS oldest)"
)
INSERT_DELETION = "INSERT INTO deletions (at, decision, question_key, owner) VALUES (?, ?, ?, ?)"
# Earlier versions did not store from which messages a follow-up was made. Their decisions get this key instead.
UNKNOWN_SOURCE = "unknown"
MARK_UNKNOWN_SOURCES = (
    f"INSERT INTO source_questions SELECT id, '{UNKNOWN_SOURCE}' FROM decisions WHERE question_key IS NOT NULL "
    "AND record NOT LIKE '%\"follow_up\":%' AND id NOT IN (SELECT decision FROM source_questions)"
)
SELECT_UNKNOWN_SOURCES = (
    "SELECT id, owner, question FROM decisions WHERE question IS NOT NULL "
    f"AND id IN (SELECT decision FROM source_questions WHERE question_key = '{UNKNOWN_SOURCE}')"
)
# Owners of decisions that may be about any question: decisions with texts (comments, corrections, answers of audits)
# but without a stored question, and decisions of earlier versions whose question an LLM in the server may have rewritten.
SELECT_UNFINDABLE = (
    "WITH texts AS (SELECT decision FROM corrections UNION SELECT decision FROM feedback WHERE comment IS NOT NULL "
    "UNION SELECT decision FROM audits WHERE closed IS NOT NULL OR opened IS NOT NULL), "
    f"old AS (SELECT decision FROM source_questions WHERE question_key = '{UNKNOWN_SOURCE}') "
    # Two queries that use the index of ids. A condition with OR would read all decisions.
    "SELECT COALESCE(owner, '') FROM decisions WHERE question_key IS NULL AND id IN (SELECT * FROM texts) "
    "UNION SELECT COALESCE(owner, '') FROM decisions WHERE id IN (SELECT * FROM old) AND "
    '(record LIKE \'%"way": "in-process"%\' OR (question IS NULL AND id IN (SELECT * FROM texts)))'
)
# Feedback stays as a count for the daily limit of its API key.
DELETE_TEXTS = (
    "UPDATE feedback SET decision = '', rating = '', comment = NULL WHERE ",
    "DELETE FROM corrections WHERE ",
)
WITHOUT_DECISION = "decision > '' AND NOT EXISTS (SELECT 1 FROM decisions WHERE id = decision)"
DAY_SECONDS = 86_400.0
DELETION_BATCH = 1_000  # decisions deleted at once; others can be written before the next ones are deleted
TABLES_WITH_TEXTS = ("decisions", "feedback", "corrections", "audits", "source_questions")
DELETION_SECONDS = 3_900.0  # longer than the longest request may take, which may be about a deleted question
EXPIRY_SECONDS = 60.0  # minimum time between two removals of expired deletions from memory
READ_MARGIN_SECONDS = 600.0  # new deletions can have earlier times: other machines have other clocks
MAX_DELETIONS_PER_OWNER = 50_000  # in memory
ALL_QUESTIONS = ""  # stands for the hashes of all questions in a `DeletionIndex`


class Deletion(NamedTuple):
    """Deletion of a decision, or of all decisions on a question, by a client. Owner None means all API keys."""

    at: float
    decision: str
    question_key: str
    owner: str | None


class DeletionIndex:
    """Index of deletions, to look up whether any of them applies to a decision.

    Deletions are added by one thread; another one can look them up meanwhile.

    Args:
        deletions: The first deletions.
        max_per_owner: Maximum number of ids and hashes of an owner. If an owner deletes more, all decisions of this owner
            up to then count as deleted, so that the memory is limited and no deletion is forgotten.
    """

    def __init__(self, deletions: Iterable[Deletion] = (), max_per_owner: float = math.inf):
        self._max_per_owner = max_per_owner
        self._read_at = time.time()  # requests that began before the index was created are not looked up
        self._oldest = self._read_at - DELETION_SECONDS
        # The latest time at which each owner deleted an id or the hash of a question.
        self._times: dict[str | None, dict[str, float]] = {}
        self.add(deletions)

    def add(self, deletions: Iterable[Deletion]) -> None:
        """Add deletions, and drop those older than DELETION_SECONDS."""
        for at, id, key, owner in deletions:
            times = self._times.setdefault(owner, {})
            for name in filter(None, (id, key)):
                times[name] = max(at, times.get(name, at))
            if len(times) > self._max_per_owner:
                self._times[owner] = {ALL_QUESTIONS: max(times.values())}
        oldest = time.time() - DELETION_SECONDS
        if oldest > self._oldest + EXPIRY_SECONDS:
            self._oldest = oldest
            latest = {owner: {k: at for k, at in times.items() if at >= oldest} for owner, times in self._times.items()}
            self._times = {owner: times for owner, times in latest.items() if times}

    def read_new(self, store: Store) -> None:
        """Add deletions by all server processes that are new in the tables. Runs in the thread of the decision log."""
        now = time.time()
        oldest = min(self._read_at, now) - READ_MARGIN_SECONDS  # the clock may have been set back
        self.add(map(Deletion._make, store.fetch_rows(SELECT_DELETIONS, (oldest,))))
        self._read_at = now

    def covers(self, id: str, question_keys: Iterable[str], owner: str, at: float) -> bool:
        """Return whether a decision was deleted after `at`, the start of its request."""
        names = (ALL_QUESTIONS, id, *question_keys)
        deleted = [self._times.get(deleter, {}) for deleter in (owner, None)]
        return any(at <= times[name] for times in deleted for name in names if name in times)


def add_missing_hashes(store: Store) -> None:
    """Add the hashes of questions, which earlier versions did not store."""
    rows = store.fetch_rows("SELECT id, question FROM decisions WHERE question IS NOT NULL AND question_key IS NULL")
    if rows:
        with store.transaction() as transaction:
            values = [(question_key(question), id) for id, question in rows]
            transaction.executemany("UPDATE decisions SET question_key = ? WHERE id = ?", values)


def mark_unknown_sources(store: Store) -> None:
    """Mark decisions of earlier versions, which did not store from which chat messages a question was made.

    A mark is a row in the table `source_questions`, with UNKNOWN_SOURCE instead of the hash of a message.
    """
    with store.transaction(WRITE_LOCK) as transaction:
        transaction.execute(MARK_UNKNOWN_SOURCES)


def find_ids(store: Store, id: str, question: str, owner: str | None) -> list[str]:
    """Return the ids of the decisions with this id, and of those on this question. Owner None means all API keys.

    Decisions on a follow-up that was made from this question are included.
    """
    key = question_key(question) if question else None
    rows = store.fetch_rows(SELECT_DECISIONS, (id, key, key))
    if question:
        # For decisions of earlier versions, the messages behind a follow-up are unknown, so the text itself is searched.
        old_rows = store.fetch_rows(SELECT_UNKNOWN_SOURCES)
        rows += [(row_id, row_owner) for row_id, row_owner, text in old_rows if _contains_question(text, question)]
    ids = [row_id for row_id, row_owner in rows if owner is None or owner == (row_owner or "")]
    return list(dict.fromkeys(ids))  # without duplicates


def _contains_question(text: str, question: str) -> bool:
    """Return whether a text contains all words of a question in a row. Case and punctuation are ignored."""
    words = normalize(text)
    question_words = normalize(question)
    if not question_words.isascii():  # Chinese has no spaces between words
        return question_words in words
    return bool(question_words) and f" {question_words} " in f" {words} "


def record_deletion(store: Store, id: str, question: str, owner: str | None) -> list[str]:
    """Record a deletion, and return the ids of the decisions with this id or question. Owner None means all API keys.

    The record stays for DELETION_SECONDS, because processes may still have to write such decisions.
    """
    key = question_key(question) if question else ""
    with store.transaction(WRITE_LOCK) as transaction:
        now = time.time()  # after the wait for the lock
        transaction.execute(DELETE_OLD_DELETIONS, (now - DELETION_SECONDS, DELETION_BATCH))
        transaction.execute(INSERT_DELETION, (now, id, key, owner))
    return find_ids(store, id, question, owner)


def delete_rows(store: Store, ids: Sequence[str]) -> None:
    """Delete decisions with their feedback, corrections and stored answers, in one transaction. Then call `vacuum`.

    The results of audits remain, without the compared answers. Feedback remains as a count, see DELETE_TEXTS.
    """
    values = [(id,) for id in ids]
    with store.transaction(WRITE_LOCK) as transaction:
        transaction.executemany("DELETE FROM decisions WHERE id = ?", values)
        transaction.executemany("DELETE FROM source_questions WHERE decision = ?", values)
        for statement in DELETE_TEXTS:
            transaction.executemany(f"{statement} decision = ?", values)
        transaction.executemany("UPDATE audits SET closed = NULL, opened = NULL WHERE decision = ?", values)


def delete_orphaned_feedback(store: Store) -> bool:
    """Delete feedback on decisions that do not exist. This reads all feedback, so call it rarely.

    Returns:
        Whether there was such feedback. Then call `vacuum`.
    """
    with store.transaction(WRITE_LOCK) as transaction:
        count: int = sum(transaction.execute(statement + WITHOUT_DECISION).rowcount for statement in DELETE_TEXTS)
        # Feedback without a decision only counts for the daily limit of its API key.
        transaction.execute("DELETE FROM feedback WHERE decision = '' AND at < ?", (time.time() - DAY_SECONDS,))
    return count > 0
