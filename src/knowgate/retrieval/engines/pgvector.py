"""The user's own table in PostgreSQL, searched by pgvector: nothing is copied, nothing is written.

`pgvector:postgresql://reader@db/app?table=docs.passages&text=body&vector=embedding&filter.lang=en` names the columns;
what is left of the address is libpq's. The vectors must be of the embedding that is named, for queries are embedded by
it here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode

from knowgate.core.files import sha256_text
from knowgate.core.postgres import open_postgres
from knowgate.core.postgres.address import DatabaseAddress, format_vector, parse_database_address, to_storable_text
from knowgate.errors import BadSetting
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, SentenceEmbedder, check_vectors
from knowgate.retrieval.passages import check_k
from knowgate.types import Embedder, Passage

if TYPE_CHECKING:
    from knowgate.core.postgres.database import PostgresDatabase

SQL_IDENTIFIER = re.compile(r"\w{1,63}")
DISTANCES = {"cosine": ("<=>", 1.0), "ip": ("<#>", 0.0), "l2": ("<->", 0.0)}  # operator, and what to take it from
VECTOR_TYPES = ("vector", "halfvec")
FILTER_PREFIX = "filter."
TABLE_OPTIONS = ("table", "id", "text", "title", "vector", "embedder", "distance", "version")
# walked on until enough rows pass the filter; pgvector before 0.8 does not know these, and is searched exactly then
SCAN_SETTINGS = (
    ("hnsw.iterative_scan", "relaxed_order"),
    ("ivfflat.iterative_scan", "relaxed_order"),
    ("hnsw.ef_search", "120"),
)
EXAMPLE_SPEC = "pgvector:postgresql://USER@HOST/DATABASE?table=passages&id=id&text=text&vector=embedding"


@dataclass(frozen=True)
class TableSpec:
    """Which table, which columns and rows of it. version: says what is in it, so that it need not be read."""

    table: str
    id: str = "id"
    text: str = "text"
    title: str = ""
    vector: str = "embedding"
    embedder: str = DEFAULT_EMBEDDER
    distance: str = "cosine"
    version: str = ""
    filters: tuple[tuple[str, tuple[str, ...]], ...] = field(default=())

    def __post_init__(self) -> None:
        names = [*self.table.split("."), self.id, self.text, self.vector, *([self.title] if self.title else [])]
        for name in (*names, *(column for column, _ in self.filters)):
            if not SQL_IDENTIFIER.fullmatch(name):
                raise BadSetting(
                    f"pgvector: '{name[:80]}' cannot be used as the name of a table or column; only letters, digits "
                    "and underscores can. Make a view with such names."
                )
        if len(self.table.split(".")) > 2:
            raise BadSetting(f"pgvector: the table is '{self.table}'; write TABLE or SCHEMA.TABLE.")
        if self.distance not in DISTANCES:
            raise BadSetting(f"pgvector: the distance is '{self.distance}'; allowed: {', '.join(DISTANCES)}.")

    @property
    def quoted(self) -> str:
        return ".".join(_quoted(name) for name in self.table.split("."))


def parse_table_spec(spec: str) -> tuple[DatabaseAddress, TableSpec]:
    """The database, and what of it."""
    place, _, parameters = spec.partition("?")
    pairs = parse_qsl(parameters, keep_blank_values=True)
    filters: dict[str, list[str]] = {}
    for key, value in pairs:
        if key.startswith(FILTER_PREFIX):
            filters.setdefault(key.removeprefix(FILTER_PREFIX), []).append(value)
    named = {key: value for key, value in pairs if key in TABLE_OPTIONS}
    rest = [(key, value) for key, value in pairs if key not in TABLE_OPTIONS and not key.startswith(FILTER_PREFIX)]
    address = parse_database_address(f"{place}?{urlencode(rest, quote_via=quote)}" if rest else place)
    if not named.get("table"):
        raise BadSetting(f"pgvector: {address.shown} names no table. Write it so: {EXAMPLE_SPEC}")
    chosen = tuple((column, tuple(values)) for column, values in sorted(filters.items()))
    return address, TableSpec(**named, filters=chosen)


class PgvectorRetriever:
    """Read only. embedder: instead of the one that the spec names."""

    name = "pgvector"

    def __init__(self, spec: str, embedder: Embedder | None = None):
        self._address, self._spec = parse_table_spec(spec)
        self._db: PostgresDatabase = open_postgres(self._address, None, SCAN_SETTINGS)
        self._embedder = embedder or SentenceEmbedder(self._spec.embedder)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the rows that can be found, their texts and vectors; or with `version`, where that is given."""
        named = (repr(self._spec), self._embedder.fingerprint)
        return sha256_text(self.name, *named, self._spec.version or self._content)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_k(k)
        if not queries:
            return []
        kind = self._kind
        vectors = check_vectors(self._embedder.embed([to_storable_text(query) for query in queries]), len(queries))
        self._check_width(vectors.shape[1])
        return [self._nearest(format_vector(vector), k, kind) for vector in vectors]

    def _nearest(self, vector: str, k: int, kind: str) -> list[Passage]:
        """By an index of the table, if it has one; all of it where that gave too few, as it may under a filter."""
        rows = self._ranked(vector, k, kind, exact=False)
        if len(rows) < k:
            rows = self._ranked(vector, k, kind, exact=True)
        _, most = DISTANCES[self._spec.distance]
        rows.sort(key=lambda row: (row[3], str(row[0])))
        return [Passage(str(row[0]), str(row[1]), str(row[2] or ""), most - float(row[3])) for row in rows]

    def _ranked(self, vector: str, k: int, kind: str, *, exact: bool) -> list[tuple[Any, ...]]:
        spec, (operator, _) = self._spec, DISTANCES[self._spec.distance]
        distance = f"{_quoted(spec.vector)} {operator} ?::{kind}"
        title = _quoted(spec.title) if spec.title else "''"
        query = (
            f"SELECT {_quoted(spec.id)}, {_quoted(spec.text)}, {title}, {f'({distance}) + 0' if exact else distance} "
            f"AS distance FROM {spec.quoted} WHERE {self._which} ORDER BY distance LIMIT ?"
        )
        return self._db.read(query, [vector, *self._values, k])

    @property
    def _which(self) -> str:
        there = [f"{_quoted(name)} IS NOT NULL" for name in (self._spec.text, self._spec.vector)]
        return " AND ".join([*there, *(f"{_quoted(column)}::text = ANY(?)" for column, _ in self._spec.filters)])

    @property
    def _values(self) -> list[Any]:
        return [[to_storable_text(value) for value in values] for _, values in self._spec.filters]

    # --- what is there ----------------------------------------------------------------------------

    @cached_property
    def _columns(self) -> dict[str, str]:
        """The table's columns with their types."""
        query = (
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(?) AND attnum > 0 AND NOT attisdropped"
        )
        found = {str(name): str(kind) for name, kind in self._db.read(query, [self._spec.quoted])}
        if not found:
            raise BadSetting(
                f"pgvector: there is no table '{self._spec.table}' in {self._address.shown}. Write table=TABLE or "
                "table=SCHEMA.TABLE, as it is spelt there."
            )
        spec = self._spec
        wanted = [spec.id, spec.text, spec.vector, *([spec.title] if spec.title else []), *dict(spec.filters)]
        if missing := [name for name in wanted if name not in found]:
            raise BadSetting(
                f"pgvector: the table '{spec.table}' has no column '{missing[0]}'; it has {', '.join(found)}. Name "
                "yours: id=, text=, title=, vector=."
            )
        return found

    @cached_property
    def _kind(self) -> str:
        """The type of the vectors, without its width."""
        kind = self._columns[self._spec.vector].rpartition(".")[2].partition("(")[0]
        if kind not in VECTOR_TYPES:
            raise BadSetting(
                f"pgvector: the column '{self._spec.vector}' of '{self._spec.table}' is of type {kind}; it must be "
                f"{' or '.join(VECTOR_TYPES)}."
            )
        return kind

    def _check_width(self, width: int) -> None:
        there = re.search(r"\((\d+)\)", self._columns[self._spec.vector])
        if there is not None and int(there.group(1)) != width:
            raise BadSetting(
                f"pgvector: the column '{self._spec.vector}' holds vectors of {there.group(1)} numbers, and the "
                f"embedding '{self._spec.embedder}' gives {width}: name the one they were made with, embedder=NAME."
            )

    @property
    def _content(self) -> str:
        """How many rows, and the sum of a hash of each: the same in any order."""
        spec, kind = self._spec, self._kind
        texts = [_quoted(name) + "::text" for name in (spec.id, spec.text, *([spec.title] if spec.title else []))]
        joined = f"concat_ws(chr(31), {', '.join(texts)})"
        row = f"md5(convert_to({joined}, 'UTF8') || {kind}_send({_quoted(spec.vector)}))"
        number = f"('x' || left({row}, 15))::bit(60)::bigint"
        query = f"SELECT count(*), coalesce(sum({number}), 0)::text FROM {spec.quoted} WHERE {self._which}"
        count, total = self._db.read(query, self._values)[0]
        return f"{count} {total}"


def _quoted(name: str) -> str:
    return f'"{name}"'
