"""Without the extra, and what is shared where it is there."""

from __future__ import annotations

from knowgate.core.postgres import open_postgres
from knowgate.core.postgres.address import parse_database_address
from knowgate.data.history.postgres_store import HISTORY_TABLES
from tests.support.processes import python

WITHOUT = """
import sys
sys.modules["psycopg"] = sys.modules["psycopg_pool"] = None
from knowgate.errors import MissingExtra
from knowgate.data.history import history_exists, open_history
from knowgate.retrieval import load_retriever
from knowgate.server.telemetry.decision_log import DecisionLog

address = "postgresql://me:hunter2-Xyzzy@h/db?table=t"
for use in (
    lambda: open_history(address), lambda: history_exists(address), lambda: load_retriever("pgvector:" + address),
    lambda: DecisionLog(address, stores_questions=False),
):
    try:
        use()
    except MissingExtra as error:
        print(error)
print("files work:", not history_exists("no/such/log.db"))
"""


def test_a_missing_extra_is_named_and_files_work():
    said = python(WITHOUT).splitlines()
    assert len(said) == 5
    assert all(
        line.endswith("needs the 'postgres' extra. Install it: pip install 'knowgate[postgres]'") for line in said[:4]
    )
    assert said[4] == "files work: True"
    assert "hunter2" not in "".join(said)


def test_the_same_tables_are_opened_once_in_a_process():
    first, again, other = (parse_database_address(f"postgresql://h/db?schema={name}") for name in ("a", "a", "b"))
    assert open_postgres(first, HISTORY_TABLES) is open_postgres(again, HISTORY_TABLES)
    assert open_postgres(first, HISTORY_TABLES) is not open_postgres(other, HISTORY_TABLES)
