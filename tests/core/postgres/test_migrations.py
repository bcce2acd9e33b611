"""Tables that grow by version: from nothing, from an older one, all or nothing, by one process at a time."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import pytest

from knowgate.core.postgres import TableSchema
from knowgate.core.postgres.address import parse_database_address
from knowgate.core.postgres.database import PostgresDatabase
from knowgate.errors import ArtifactError
from tests.support.postgres_server import postgres_server
from tests.support.processes import child

ONE = ("CREATE TABLE things (name TEXT)", "INSERT INTO things VALUES ('kept')")
TWO = ("ALTER TABLE things ADD COLUMN size INTEGER NOT NULL DEFAULT 7",)
FIRST = TableSchema("toys", (ONE,), {"things": frozenset({"name"})})
SECOND = TableSchema("toys", (ONE, TWO), {"things": frozenset({"name", "size"})})


@pytest.fixture
def address():
    return parse_database_address(postgres_server().address())


def test_an_older_version_is_migrated_and_keeps_its_rows(address):
    assert PostgresDatabase(address, FIRST).read("SELECT * FROM things") == [("kept",)]
    assert PostgresDatabase(address, SECOND).read("SELECT * FROM things") == [("kept", 7)]
    assert PostgresDatabase(address, SECOND).read("SELECT part, version FROM versions") == [("toys", 2)]
    with pytest.raises(ArtifactError, match=r"have format 2, but"):
        PostgresDatabase(address, FIRST).read("SELECT * FROM things")


def test_a_step_that_fails_leaves_the_older_version_as_it_was(address):
    PostgresDatabase(address, FIRST).read("SELECT 1")
    broken = TableSchema("toys", (ONE, (*TWO, "ALTER TABLE nothing ADD COLUMN x INT")), SECOND.tables)
    with pytest.raises(ArtifactError, match='"nothing" does not exist'):
        PostgresDatabase(address, broken).read("SELECT 1")
    assert PostgresDatabase(address, FIRST).read("SELECT * FROM things") == [("kept",)]


def test_parts_of_one_schema_have_versions_of_their_own(address):
    other = TableSchema("games", (("CREATE TABLE games (name TEXT)",),), {"games": frozenset({"name"})})
    assert not PostgresDatabase(address, other).has_tables
    PostgresDatabase(address, SECOND).read("SELECT 1")
    assert not PostgresDatabase(address, other).has_tables
    PostgresDatabase(address, other).read("SELECT * FROM games")
    assert PostgresDatabase(address, other).has_tables


MAKER = """
import sys
from knowgate.core.postgres.address import parse_database_address
from knowgate.core.postgres.database import PostgresDatabase
from tests.core.postgres.test_migrations import SECOND

assert PostgresDatabase(parse_database_address(sys.argv[1]), SECOND).read("SELECT * FROM things") == [("kept", 7)]
"""


def test_concurrent_processes_create_the_tables_once():
    place = postgres_server().address()
    with ExitStack() as stack:
        makers = [stack.enter_context(child([sys.executable, "-c", MAKER, place])) for _ in range(4)]
        assert [maker.wait() for maker in makers] == [0] * 4
