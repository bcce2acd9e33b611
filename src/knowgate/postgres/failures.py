"""What went wrong with a database, in one sentence: which one, why, what to do. Passwords are hidden."""

from __future__ import annotations

import psycopg
from psycopg import errors
from psycopg_pool import PoolTimeout

from knowgate.errors import ArtefactError, BadSetting, KnowgateError
from knowgate.postgres.address import DatabaseAddress

LONGEST = 300  # characters of a server's own words
LOGIN = (errors.InvalidPassword, errors.InvalidAuthorizationSpecification)
MISSING = (errors.UndefinedTable, errors.UndefinedColumn, errors.UndefinedObject, errors.UndefinedFunction)
FULL = (errors.DiskFull, errors.OutOfMemory)
BUSY = (errors.LockNotAvailable, errors.DeadlockDetected, errors.QueryCanceled, errors.TooManyConnections)


def failure(address: DatabaseAddress, error: Exception) -> KnowgateError:
    """The error to raise instead."""
    shown, said = address.shown, _words(address, error)
    if isinstance(error, PoolTimeout):
        return KnowgateError(f"the database {shown} did not answer in time: check that it runs and is not overloaded.")
    if isinstance(error, errors.InsufficientPrivilege):
        return BadSetting(
            f"this user may not do that in the database {shown}: {said}. Let its owner grant the rights on the schema "
            f"'{address.schema}', or give the address of a user who has them."
        )
    if isinstance(error, MISSING):
        return not_whole(address, said)
    if isinstance(error, FULL):
        return KnowgateError(f"the database {shown} has no room: {said}. What was written before is safe; make room.")
    if isinstance(error, BUSY):
        return KnowgateError(f"the database {shown} is busy: {said}. Try again in a moment.")
    if isinstance(error, psycopg.OperationalError):
        return unreachable(address, error)
    return ArtefactError(f"the database {shown} cannot be used: {said}.")


def unreachable(address: DatabaseAddress, error: Exception) -> KnowgateError:
    said = _words(address, error)
    if isinstance(error, psycopg.ProgrammingError):  # libpq cannot read it; its words may quote any part of it
        return BadSetting(
            f"the address {address.shown} cannot be read: write a user or password with special characters as %40 (@), "
            "%2F (/), %3A (:), or leave the password to PGPASSWORD."
        )
    if "password" in said or isinstance(error, LOGIN):
        return KnowgateError(
            f"the database {address.shown} refused the login: {said}. Check the user, and the password in PGPASSWORD, "
            "~/.pgpass or the address."
        )
    return KnowgateError(f"cannot reach the database {address.shown}: {said}. Check that it runs and the address.")


def not_whole(address: DatabaseAddress, why: str) -> KnowgateError:
    return ArtefactError(
        f"the schema '{address.schema}' of {address.shown} is not whole, as if a migration had been cut off or undone: "
        f"{why}. It was left as it is: restore it from a backup, or name another one with ?schema=NAME."
    )


def _words(address: DatabaseAddress, error: Exception) -> str:
    """The first line of what was said; the others are hints and positions."""
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    lines = str(primary or error).strip().splitlines() or [type(error).__name__]
    return address.hide(lines[0])[:LONGEST]
