"""Addresses of databases: what libpq gets, what people read, and passwords that nobody does."""

from __future__ import annotations

import pytest

from knowgate.core.postgres.address import is_postgres_address, parse_database_address
from knowgate.core.redaction import redact_secrets
from knowgate.errors import BadSetting


@pytest.mark.parametrize(
    ("spec", "conninfo", "schema", "shown"),
    [
        ("postgresql://h/db", "postgresql://h/db", "knowgate", "postgresql://h/db"),
        ("postgres://me@h:5/db", "postgresql://me@h:5/db", "knowgate", "postgres://me@h:5/db"),
        ("postgresql://me:pw@h/db?schema=a_1", "postgresql://me:pw@h/db", "a_1", "postgresql://***@h/db?schema=a_1"),
        (
            "postgresql://h/db?sslmode=require&schema=x&password=p%40w",
            "postgresql://h/db?sslmode=require&password=p%40w",
            "x",
            "postgresql://h/db?sslmode=require&schema=x&password=***",
        ),
        ("postgresql://me:a@b/c@h/db", "postgresql://me:a@b/c@h/db", "knowgate", "postgresql://***@h/db"),
    ],
)
def test_an_address_is_split_into_conninfo_and_schema(spec, conninfo, schema, shown):
    address = parse_database_address(spec)
    assert (address.conninfo, address.schema, address.redacted) == (conninfo, schema, shown)


@pytest.mark.parametrize("schema", ["A", "a-b", "1a", "pg_catalog", "a;drop", "x" * 64, "", 'a"b'])
def test_invalid_schema_names_are_rejected(schema):
    with pytest.raises(BadSetting, match=r"schema name in .* is not allowed. Use lowercase letters"):
        parse_database_address(f"postgresql://h/db?schema={schema}")


def test_an_invalid_address_is_rejected_with_an_example():
    with pytest.raises(BadSetting, match=r"not the address of a database\. Write postgresql://USER@HOST"):
        parse_database_address("mysql://h/db")
    assert not is_postgres_address("history.db")
    assert is_postgres_address(" postgres://h/db")


def test_passwords_are_hidden_wherever_they_stand_and_however_they_are_written():
    address = parse_database_address("postgresql://me:s%40cret%21@h/db")
    assert address.redact('password "s@cret!" or s%40cret%21\n is wrong.') == 'password "***" or *** is wrong'
    assert "cret" not in repr(address)
    said = redact_secrets("see postgresql://me:secret@h/db and postgresql://x:y/z@h2/db?passfile=/k&x=1")
    assert said == "see postgresql://***@h/db and postgresql://***@h2/db?passfile=***&x=1"
    assert redact_secrets("log.db") == "log.db"
