"""Stores ratings, comments and corrections in the tables of the decision log."""

from __future__ import annotations

import time

from knowgate.server.database import WRITE_LOCK, Store
from knowgate.server.json_api import ApiError
from knowgate.server.telemetry.deletions import DAY_SECONDS

INSERT_FEEDBACK = "INSERT INTO feedback (decision, at, rating, comment, owner) VALUES (?, ?, ?, ?, ?)"
# A correction gets the time of the feedback that it came with, because this shows which API key gave the correction.
MOVE_CORRECTION = (
    "UPDATE corrections SET at = ? WHERE decision = ? "
    "AND at IN (SELECT at FROM feedback WHERE decision = ? AND owner = ?)"
)
INSERT_CORRECTION = "INSERT INTO corrections (decision, at, answer) VALUES (?, ?, ?)"


def store_feedback(
    store: Store, id: str, rating: str, comment: str | None, owner: str, correction: str | None, max_per_day: int
) -> bool:
    """Store feedback on a decision, and return whether the decision exists. It replaces the owner's earlier feedback.

    An earlier correction stays if there is no new one.

    Raises:
        ApiError: 429 if this owner has given too much feedback within a day.
    """
    count_others = "SELECT COUNT(*) FROM feedback WHERE owner = ? AND at > ? AND decision <> ?"
    deletion = "DELETE FROM feedback WHERE decision = ? AND (owner = ? OR owner IS NULL)"  # NULL: from old versions
    with store.transaction(WRITE_LOCK) as transaction:  # no process can delete the decision meanwhile
        if transaction.execute("SELECT 1 FROM decisions WHERE id = ?", (id,)).fetchone() is None:
            return False
        ((count,),) = transaction.execute(count_others, (owner, time.time() - DAY_SECONDS, id)).fetchall()
        if count >= max_per_day:
            message = f"this API key has rated {max_per_day:,} decisions within a day. Try again tomorrow."
            raise ApiError(429, message, "too_much_feedback", {"retry-after": "3600"})
        now = time.time()
        transaction.execute(MOVE_CORRECTION, (now, id, id, owner))
        transaction.execute(deletion, (id, owner))
        transaction.execute(INSERT_FEEDBACK, (id, now, rating, comment, owner))
        if correction:
            transaction.execute("DELETE FROM corrections WHERE decision = ?", (id,))
            transaction.execute(INSERT_CORRECTION, (id, now, correction))
    return True
