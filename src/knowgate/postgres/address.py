"""Where a database is: 'postgresql://USER@HOST:PORT/DATABASE?schema=NAME', and how that is said without its password.

All that libpq knows may stand in it, and what is left out comes from where libpq looks (PGPASSWORD, ~/.pgpass, ...).
`schema` is ours: several logs can live in one database. Knows no psycopg.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlencode

from knowgate.errors import BadSetting

SCHEMES = ("postgresql://", "postgres://")
DEFAULT_SCHEMA = "knowgate"
NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
SECRET = ("password", "passfile", "sslpassword", "sslkey")  # parameters that are not said again
EXAMPLE = "postgresql://USER@HOST:5432/DATABASE"


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


def is_postgres(spec: str) -> bool:
    return spec.strip().startswith(SCHEMES)


def without_password(text: str) -> str:
    """The text with logins of addresses and secret parameters hidden; other texts as they are."""
    if "://" not in text:
        return text
    hidden = re.sub(r"(postgres(?:ql)?://)[^\s?]*:[^\s?]*@", r"\1***@", text)  # to the last @: passwords hold slashes
    names = "|".join(SECRET)
    return re.sub(rf"([?&](?:{names})=)[^&\s]*", r"\1***", hidden)


def read_database_address(spec: str, *, schema: str = DEFAULT_SCHEMA) -> DatabaseAddress:
    """schema: where none is named."""
    spec = spec.strip()
    login, path, asked = _split(spec)
    named = dict(asked)
    chosen = named.pop("schema", schema)
    if not NAME.fullmatch(chosen) or chosen.startswith("pg_"):
        raise BadSetting(
            f"the schema of {without_password(spec)} cannot be used: its name must be small letters, digits and "
            "underscores, such as ?schema=team_a."
        )
    scheme = SCHEMES[0]
    asked_of_libpq = f"?{urlencode(named, quote_via=quote)}" if named else ""
    conninfo = f"{scheme}{login}{'@' if login else ''}{path}{asked_of_libpq}"
    secrets = [unquote(part) for part in login.partition(":")[2:]] + [named.get(key, "") for key in SECRET]
    written = [quote(secret, safe="") for secret in secrets]
    found = sorted({one for one in (*secrets, *written) if len(one) > 2}, key=len, reverse=True)
    return DatabaseAddress(conninfo, chosen, without_password(spec), tuple(found))


def _split(spec: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Login, host with database, parameters."""
    rest = next((spec.removeprefix(scheme) for scheme in SCHEMES if spec.startswith(scheme)), None)
    if rest is None:
        raise BadSetting(f"'{without_password(spec)}' is no address of a database such as {EXAMPLE}.")
    before, _, parameters = rest.partition("?")
    login, _, path = before.rpartition("@")
    return login, path, parse_qsl(parameters, keep_blank_values=True)
