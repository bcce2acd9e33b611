"""Questions and corrections that are read from the decision log of a server."""

import asyncio
import sqlite3
from contextlib import closing

import pytest

from knowgate.evaluation.server_log import read_logged_questions
from knowgate.server.telemetry.decision_log import DecisionLog


@pytest.mark.parametrize("rater", ["admin", "alice"])
def test_a_correction_belongs_to_the_same_key_after_another_rating(tmp_path, rater):
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=True)
    for number, owner in enumerate(("alice", "alice", "alice", "bob")):
        log.append({"id": f"kg-{number}"}, f"Question {number}?", owner).result(30)
    for number in range(3):
        asyncio.run(log.add_feedback(f"kg-{number}", "down", None, "alice"))
        asyncio.run(log.add_feedback(f"kg-{number}", "down", None, "admin", correction="Rome"))
    for number in range(3):
        asyncio.run(log.add_feedback(f"kg-{number}", "down", "a comment", rater))
    log.close()
    logged = read_logged_questions(tmp_path / "d.db", 100)
    assert (logged.n_corrections, logged.n_keys, logged.n_unused) == (3, 1, 0)  # those of an admin all count
    with closing(sqlite3.connect(tmp_path / "d.db")) as database:
        query = "SELECT owner FROM feedback JOIN corrections USING (decision, at)"
        assert database.execute(query).fetchall() == [("admin",)] * 3
