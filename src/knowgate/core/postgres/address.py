"""Where a database is: 'postgresql://USER@HOST:PORT/DATABASE?schema=NAME', and how that is said without its password.

All that libpq knows may stand in it, and what is left out comes from where libpq looks (PGPASSWORD, ~/.pgpass, ...).
`schema` is ours: several logs can live in one database. Knows no psycopg.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlencode

from knowgate.core.redaction import redact_secrets
from knowgate.errors import BadSetting

SCHEMES = ("postgresql://", "postgres://")
DEFAULT_SCHEMA = "knowgate"
SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
SECRET_PARAMETERS = ("password", "passfile", "sslpassword", "sslkey")  # parameters that are not said again
EXAMPLE_ADDRESS = "postgresql://USER@HOST:5432/DATABASE"


@dataclass(frozen=True)
class DatabaseAddress:
    """conninfo: for libpq. shown: for people. secrets: what must never be said, should a server repeat it."""

    conninfo: str = field(repr=False)
    schema: str
    shown: str
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def hide(self, words: str) -> str:
        """A server's words in one line, without what is secret."""
        for secret in self.secrets:
            words = words.replace(secret, "***")
        return " ".join(words.split()).rstrip(".")


def is_postgres_address(spec: str) -> bool:
    return spec.strip().startswith(SCHEMES)


def parse_database_address(spec: str, *, schema: str = DEFAULT_SCHEMA) -> DatabaseAddress:
    """schema: where none is named."""
    spec = spec.strip()
    login, path, asked = _split(spec)
    named = dict(asked)
    chosen = named.pop("schema", schema)
    if not SCHEMA_NAME.fullmatch(chosen) or chosen.startswith("pg_"):
        raise BadSetting(
            f"the schema of {redact_secrets(spec)} cannot be used: its name must be small letters, digits and "
            "underscores, such as ?schema=team_a."
        )
    scheme = SCHEMES[0]
    asked_of_libpq = f"?{urlencode(named, quote_via=quote)}" if named else ""
    conninfo = f"{scheme}{login}{'@' if login else ''}{path}{asked_of_libpq}"
    secrets = [unquote(part) for part in login.partition(":")[2:]] + [named.get(key, "") for key in SECRET_PARAMETERS]
    written = [quote(secret, safe="") for secret in secrets]
    found = sorted({one for one in (*secrets, *written) if len(one) > 2}, key=len, reverse=True)
    return DatabaseAddress(conninfo, chosen, redact_secrets(spec), tuple(found))


def _split(spec: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Login, host with database, parameters."""
    rest = next((spec.removeprefix(scheme) for scheme in SCHEMES if spec.startswith(scheme)), None)
    if rest is None:
        raise BadSetting(f"'{redact_secrets(spec)}' is no address of a database such as {EXAMPLE_ADDRESS}.")
    before, _, parameters = rest.partition("?")
    login, _, path = before.rpartition("@")
    return login, path, parse_qsl(parameters, keep_blank_values=True)


NUL, REPLACEMENT = "\0", "\N{REPLACEMENT CHARACTER}"


def to_storable_text(text: str) -> str:
    """A text that a column can hold: PostgreSQL knows neither NUL nor half characters."""
    return text.replace(NUL, REPLACEMENT).encode("utf-8", "replace").decode("utf-8")


def format_vector(numbers: Iterable[float]) -> str:
    """A vector as pgvector reads it; nine digits bring every 32-bit number back."""
    return "[" + ",".join(f"{number:.9g}" for number in numbers) + "]"
