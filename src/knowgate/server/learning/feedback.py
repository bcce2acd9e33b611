"""`POST /v1/feedback`: what people think of an answer, kept with the decision and, where it tells, in the history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from knowgate.server.decision_log import DecisionLog
from knowgate.server.learning.learner import Learner
from knowgate.server.problems import Problem
from knowgate.server.recent import Recent

LONGEST = 10_000  # characters of a comment or correction


@dataclass(frozen=True)
class Feedback:
    """correction: the answer as it should have been."""

    id: str
    rating: str
    comment: str | None = None
    correction: str | None = None


def read_feedback(body: Mapping[str, Any]) -> Feedback:
    """A correction alone is a thumb down."""
    correction, comment = (_text(body.get(name), name) for name in ("correction", "comment"))
    id, rating = body.get("id"), body.get("rating", "down" if correction else None)
    if not isinstance(id, str) or rating not in ("up", "down"):
        raise Problem(400, "give 'id', 'rating' (up or down), perhaps 'comment', 'correction'.", "invalid_feedback")
    return Feedback(id, rating, comment, correction)


def _text(value: Any, name: str) -> str | None:
    if value is not None and not (isinstance(value, str) and len(value) <= LONGEST):
        raise Problem(400, f"'{name}' must be a text of at most {LONGEST:,} characters.", "invalid_feedback")
    return value


async def take_feedback(
    feedback: Feedback, decisions: DecisionLog, recent: Recent, learner: Learner | None
) -> dict[str, Any]:
    """Once it is taken it is on disk. learnt: it went into the history as a label."""
    if not await decisions.rate(feedback.id, feedback.rating, feedback.comment):
        raise Problem(404, "there is no such decision.", "no_decision")
    learnt = False
    kept = learner.auditor.kept if learner is not None else None
    if learner is not None and kept is not None:
        if feedback.correction:
            await kept.correct(feedback.id, feedback.correction)
        found = recent.find(feedback.id) or await decisions.find(feedback.id) or {}
        found = {**await kept.answers(feedback.id), **found}
        learnt = await learner.learn(feedback.id, feedback.rating, feedback.correction, found)
    return {"id": feedback.id, "rating": feedback.rating, "learnt": learnt}
