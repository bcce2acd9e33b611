"""What was kept of a question is deleted: from the log of decisions and from the histories that gates learn from.

Questions that differ only in case, punctuation or articles count as one, as they do in a history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from knowgate.history import HistoryStore, question_key
from knowgate.server.problems import Problem


def question_to_forget(body: Mapping[str, Any]) -> str:
    question = body.get("question")
    if not isinstance(question, str) or not question.strip():
        raise Problem(400, "'question' must be the text of a question.", "invalid_question")
    return question


def forget_in(stores: Sequence[HistoryStore], question: str) -> int:
    """How many entries are gone."""
    key = question_key(question)
    return sum(store.forget(ids=store.ids_of(key)) for store in stores)
