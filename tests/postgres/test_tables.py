"""Tables that grow by version: from nothing, from an older one, all or nothing, by one process at a time."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import pytest

from knowgate.errors import ArtefactError
from knowgate.postgres import Part, Postgres, read_database_address
from tests.support.postgres_server import postgres_server
from tests.support.processes import child

ONE = ("CREATE TABLE things (name TEXT)", "INSERT INTO things VALUES ('kept')")
TWO = ("ALTER TABLE things ADD COLUMN size INTEGER NOT NULL DEFAULT 7",)
FIRST = Part("toys", (ONE,), {"things": frozenset({"name"})})
SECOND = Part("toys", (ONE, TWO), {"things": frozenset({"name", "size"})})


@pytest.fixture
def address():
    return read_database_address(postgres_server().address())


def test_an_older_version_is_brought_up_to_date_and_keeps_its_rows(address):
    assert Postgres(address, FIRST).read("SELECT * FROM things") == [("kept",)]
    assert Postgres(address, SECOND).read("SELECT * FROM things") == [("kept", 7)]
    assert Postgres(address, SECOND).read("SELECT part, version FROM versions") == [("toys", 2)]
    with pytest.raises(ArtefactError, match="version 2, made by a newer knowgate"):
        Postgres(address, FIRST).read("SELECT * FROM things")


def test_a_step_that_fails_leaves_the_older_version_as_it_was(address):
    Postgres(address, FIRST).read("SELECT 1")
    broken = Part("toys", (ONE, (*TWO, "ALTER TABLE nothing ADD COLUMN x INT")), SECOND.tables)
    with pytest.raises(ArtefactError, match='"nothing" does not exist'):
        Postgres(address, broken).read("SELECT 1")
    assert Postgres(address, FIRST).read("SELECT * FROM things") == [("kept",)]


def test_parts_of_one_schema_have_versions_of_their_own(address):
    other = Part("games", (("CREATE TABLE games (name TEXT)",),), {"games": frozenset({"name"})})
    assert not Postgres(address, other).is_made
    Postgres(address, SECOND).read("SELECT 1")
    assert not Postgres(address, other).is_made
    Postgres(address, other).read("SELECT * FROM games")
    assert Postgres(address, other).is_made


MAKER = """
import sys
from knowgate.postgres import Postgres, read_database_address
from tests.postgres.test_tables import SECOND

assert Postgres(read_database_address(sys.argv[1]), SECOND).read("SELECT * FROM things") == [("kept", 7)]
"""


def test_processes_that_come_at_once_make_the_tables_once():
    place = postgres_server().address()
    with ExitStack() as stack:
        makers = [stack.enter_context(child([sys.executable, "-c", MAKER, place])) for _ in range(4)]
        assert [maker.wait() for maker in makers] == [0] * 4
