"""Finds decisions by their question in the tables of the decision log, and deletes them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from knowgate.core.text import normalize
from knowgate.data.history.entries import question_key
from knowgate.server.database import Store

SELECT_DECISIONS = (
    "SELECT id, owner FROM decisions WHERE id = ? OR question_key = ? "
    "OR id IN (SELECT decision FROM source_questions WHERE question_key = ?)"
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
    "SELECT DISTINCT COALESCE(owner, '') FROM decisions WHERE (question_key IS NULL AND id IN (SELECT * FROM texts)) "
    'OR (id IN (SELECT * FROM old) AND (record LIKE \'%"way": "in-process"%\' '
    "OR (question IS NULL AND id IN (SELECT * FROM texts))))"
)
DELETE_TEXTS = [  # of decisions that do not exist
    f"{action} WHERE decision > '' AND NOT EXISTS (SELECT 1 FROM decisions WHERE id = decision)"
    for action in ("UPDATE feedback SET decision = '', rating = '', comment = NULL", "DELETE FROM corrections")
]
WRITE_LOCK = "decisions"  # in a database, decisions are written and deleted by one process at a time
DAY_SECONDS = 86_400.0
DELETION_SECONDS = 600.0  # deletions are kept longer than decisions wait to be written


def mark_unknown_sources(store: Store) -> None:
    """Mark decisions of earlier versions, which did not record whether their question is a follow-up."""
    with store.transaction(WRITE_LOCK) as transaction:
        transaction.execute(MARK_UNKNOWN_SOURCES)


def find_ids_and_owners(store: Store, id: str, question: str) -> list[tuple[Any, ...]]:
    """Return the id and the owner (API key) of the decision with this id, and of all decisions on this question.

    Decisions of earlier versions, which may be follow-ups, are also found if their question contains this one.
    """
    if not question:
        return store.fetch_rows("SELECT id, owner FROM decisions WHERE id = ?", (id,))
    key = question_key(question)
    rows = store.fetch_rows(SELECT_DECISIONS, (id, key, key))
    old_rows = store.fetch_rows(SELECT_UNKNOWN_SOURCES)
    joined = [(row_id, owner) for row_id, owner, text in old_rows if _contains_question(text, question)]
    return list(dict.fromkeys([*rows, *joined]))


def _contains_question(text: str, question: str) -> bool:
    """Return whether a text contains all words of a question in a row. Case, punctuation and articles do not matter."""
    words, question_words = normalize(text), normalize(question)
    if not question_words.isascii():  # Chinese has no spaces between words
        return question_words in words
    return bool(question_words) and f" {question_words} " in f" {words} "


def delete_decisions(store: Store, id: str, question: str, owner: str | None) -> list[str]:
    """Delete the decision with this id and all decisions on this question, and return the ids of deleted decisions.

    Only decisions of the given owner (API key) are deleted, or of all owners if it is None. The deletion itself is stored
    first, so that other processes drop decisions that they have not written yet.
    """
    key, now = question_key(question) if question else "", time.time()
    with store.transaction(WRITE_LOCK) as transaction:
        transaction.execute("DELETE FROM deletions WHERE at < ?", (now - DELETION_SECONDS,))
        transaction.execute(INSERT_DELETION, (now, id, key, owner))
    rows = find_ids_and_owners(store, id, question)
    ids = [row_id for row_id, row_owner in rows if owner is None or owner == (row_owner or "")]
    delete_rows(store, ids)
    return ids


def delete_rows(store: Store, ids: Sequence[str]) -> None:
    """Delete decisions, their feedback and corrections, and the answers that audits stored.

    Two things remain: the result of an audit, a number that tells whether the answer changed, which the alarm needs;
    and for a day the time and owner of feedback, so that nobody can give more feedback a day by deleting decisions.
    Feedback and corrections of decisions that do not exist, left by earlier versions, are deleted, too.
    """
    values = [(id,) for id in ids]
    with store.transaction(WRITE_LOCK) as transaction:
        transaction.executemany("DELETE FROM decisions WHERE id = ?", values)
        transaction.executemany("DELETE FROM source_questions WHERE decision = ?", values)
        n_texts = sum(transaction.execute(statement).rowcount for statement in DELETE_TEXTS)
        transaction.execute("DELETE FROM feedback WHERE decision = '' AND at < ?", (time.time() - DAY_SECONDS,))
        transaction.executemany("UPDATE audits SET closed = NULL, opened = NULL WHERE decision = ?", values)
    if ids or n_texts:
        store.vacuum(["decisions", "feedback", "corrections", "audits"])
