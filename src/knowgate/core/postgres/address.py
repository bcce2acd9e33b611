"""Database addresses: 'postgresql://USER@HOST:PORT/DATABASE?schema=NAME'.

An address may contain every parameter of libpq, the PostgreSQL client library. libpq takes missing parts from its usual
places, such as PGPASSWORD and ~/.pgpass. The parameter `schema` is an addition of knowgate. It names the schema of the
tables, so that several logs can share a database.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlencode

from knowgate.core.redaction import REDACTED, redact_secrets
from knowgate.errors import BadSetting

SCHEMES = ("postgresql://", "postgres://")
DEFAULT_SCHEMA = "knowgate"
SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
SECRET_PARAMETERS = ("password", "passfile", "sslpassword", "sslkey")
EXAMPLE_ADDRESS = "postgresql://USER@HOST:5432/DATABASE"


@dataclass(frozen=True)
class DatabaseAddress:
    """Address of a PostgreSQL database.

    Attributes:
        conninfo: Connection string for libpq.
        schema: Name of the PostgreSQL schema that contains knowgate's tables.
        redacted: The address without secrets, for messages.
        secrets: Values that must not appear in messages, even if a server repeats them.
    """

    conninfo: str = field(repr=False)
    schema: str
    redacted: str
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def redact(self, message: str) -> str:
        """Remove the secrets from a server's message and put it on one line."""
        for secret in self.secrets:
            message = message.replace(secret, REDACTED)
        return " ".join(message.split()).rstrip(".")


def is_postgres_address(spec: str) -> bool:
    """Return whether a text is the address of a PostgreSQL database rather than a path."""
    return spec.strip().startswith(SCHEMES)


def parse_database_address(spec: str) -> DatabaseAddress:
    """Parse the address of a database, such as postgresql://USER:PASSWORD@HOST/DATABASE?schema=NAME.

    Raises:
        BadSetting: The text is not an address, or the name of its schema is not allowed.
    """
    spec = spec.strip()
    login, path, parameters = _split(spec)
    schema = parameters.pop("schema", DEFAULT_SCHEMA)
    if not SCHEMA_NAME.fullmatch(schema) or schema.startswith("pg_"):
        raise BadSetting(
            f"the schema name in {redact_secrets(spec)} is not allowed. Use lowercase letters, digits and underscores, and no "
            "pg_ at the start. Example: ?schema=team_a"
        )
    user_part = f"{login}@" if login else ""
    query = f"?{urlencode(parameters, quote_via=quote)}" if parameters else ""
    conninfo = f"{SCHEMES[0]}{user_part}{path}{query}"
    return DatabaseAddress(conninfo, schema, redact_secrets(spec), _list_secrets(login, parameters))


def _list_secrets(login: str, parameters: Mapping[str, str]) -> tuple[str, ...]:
    """List the secrets of an address for redaction, longest first."""
    password = unquote(login.partition(":")[2])
    secrets = [password, *(parameters.get(key, "") for key in SECRET_PARAMETERS)]
    # A server may repeat a secret as it is or percent-encoded. Longer texts are replaced first, very short ones never.
    secrets += [quote(secret, safe="") for secret in secrets]
    return tuple(sorted({secret for secret in secrets if len(secret) > 2}, key=len, reverse=True))


def _split(spec: str) -> tuple[str, str, dict[str, str]]:
    """Split an address into 'USER:PASSWORD', 'HOST:PORT/DATABASE' and the parameters after the question mark."""
    scheme, separator, rest = spec.partition("://")
    if scheme + separator not in SCHEMES:
        raise BadSetting(f"'{redact_secrets(spec)}' is not the address of a database. Write {EXAMPLE_ADDRESS}.")
    location, _, parameters = rest.partition("?")
    login, _, path = location.rpartition("@")
    return login, path, dict(parse_qsl(parameters, keep_blank_values=True))


def to_storable_text(text: str) -> str:
    """Replace NUL characters and lone surrogates, which PostgreSQL cannot store, by replacement characters."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")


def format_vector(numbers: Iterable[float]) -> str:
    """Format a vector as pgvector reads it. Nine digits are enough to preserve every 32-bit float."""
    return "[" + ",".join(f"{number:.9g}" for number in numbers) + "]"
