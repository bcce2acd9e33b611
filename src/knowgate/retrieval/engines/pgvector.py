"""Search your own PostgreSQL table with pgvector. The table is only read, and nothing is copied.

The spec names the table, its columns and filters. Other parameters are passed on to libpq, PostgreSQL's client library:

    pgvector:postgresql://reader@db/app?table=docs.passages&text=body&vector=embedding&filter.lang=en

Queries are embedded by knowgate, so `embedder` must name the embedding model that made the vectors in the table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from knowgate.core.files import sha256_text
from knowgate.core.postgres import open_postgres
from knowgate.core.postgres.address import DatabaseAddress, format_vector, parse_database_address, to_storable_text
from knowgate.errors import BadSetting
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, check_vectors, load_embedder
from knowgate.retrieval.engines.base import FILTER_PREFIX
from knowgate.retrieval.passages import check_k
from knowgate.types import Embedder, Passage

SQL_IDENTIFIER = re.compile(r"\w{1,63}")
# The SQL operator of each distance, and the number from which the distance is subtracted to get a score.
DISTANCES = {"cosine": ("<=>", 1.0), "ip": ("<#>", 0.0), "l2": ("<->", 0.0)}
VECTOR_TYPES = ("vector", "halfvec")
TABLE_OPTIONS = ("table", "id", "text", "title", "vector", "embedder", "distance", "version")
# With these settings, an index scan continues until enough rows match the filter. Versions of pgvector before 0.8 ignore
# them. The exact search in `_find_nearest` then finds the remaining rows.
SCAN_SETTINGS = (
    ("hnsw.iterative_scan", "relaxed_order"),
    ("ivfflat.iterative_scan", "relaxed_order"),
    ("hnsw.ef_search", "120"),
)
COLUMN_TYPES_QUERY = (
    "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
    "WHERE attrelid = to_regclass(?) AND attnum > 0 AND NOT attisdropped"
)
EXAMPLE_SPEC = "pgvector:postgresql://USER@HOST/DATABASE?table=passages&id=id&text=text&vector=embedding"


@dataclass(frozen=True)
class TableSpec:
    """The table to search, its columns, and a filter on its rows.

    Args:
        table: The name of the table, as `TABLE` or `SCHEMA.TABLE`.
        id: The column of the ids.
        text: The column of the texts.
        title: The column of the titles, or '' if there is none.
        vector: The column of the vectors.
        embedder: The embedding model that made the vectors.
        distance: How vectors are compared: `cosine`, `ip` (inner product) or `l2` (Euclidean distance).
        version: Any text that identifies the content of the table. Without it, computing the fingerprint reads all
            rows.
        filters: Columns with their allowed values. Only matching rows are searched.

    Raises:
        BadSetting: A name or the distance is not allowed.
    """

    table: str
    id: str = "id"
    text: str = "text"
    title: str = ""
    vector: str = "embedding"
    embedder: str = DEFAULT_EMBEDDER
    distance: str = "cosine"
    version: str = ""
    filters: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        table_parts = self.table.split(".")
        for name in (*table_parts, *self.columns):
            if not SQL_IDENTIFIER.fullmatch(name):
                raise BadSetting(
                    f"pgvector: '{name[:80]}' cannot be used as the name of a table or column. Only letters, digits "
                    "and underscores are allowed. Create a view with allowed names."
                )
        if len(table_parts) > 2:
            raise BadSetting(f"pgvector: table={self.table!r} is not allowed. Write TABLE or SCHEMA.TABLE.")
        if self.distance not in DISTANCES:
            allowed = ", ".join(DISTANCES)
            raise BadSetting(f"pgvector: distance={self.distance!r} is not allowed: it must be one of {allowed}.")

    @property
    def columns(self) -> list[str]:
        """The names of all columns used by a search, including filter columns."""
        titles = [self.title] if self.title else []
        return [self.id, self.text, self.vector, *titles, *(column for column, _ in self.filters)]

    @property
    def quoted_table(self) -> str:
        return ".".join(_quote(name) for name in self.table.split("."))


def parse_table_spec(spec: str) -> tuple[DatabaseAddress, TableSpec]:
    """Split a spec into the database address and the table description.

    After the question mark come options of the table, filters of rows, and settings of the connection (libpq).

    Raises:
        BadSetting: The spec names no table, or a name is not allowed.
    """
    url, _, query = spec.partition("?")
    options: dict[str, str] = {}
    filters: list[tuple[str, str]] = []
    libpq_parameters: list[tuple[str, str]] = []
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key in TABLE_OPTIONS:
            options[key] = value
        elif key.startswith(FILTER_PREFIX):
            filters.append((key.removeprefix(FILTER_PREFIX), value))
        else:
            libpq_parameters.append((key, value))
    libpq_query = urlencode(libpq_parameters, quote_via=quote)
    address = parse_database_address(f"{url}?{libpq_query}" if libpq_query else url)
    if not options.get("table"):
        raise BadSetting(f"pgvector: {address.redacted} does not name a table. Write, for example: {EXAMPLE_SPEC}")
    return address, TableSpec(**options, filters=_group_filters(filters))


def _group_filters(filters: Sequence[tuple[str, str]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return each filtered column with its allowed values, sorted by column."""
    allowed_values: dict[str, list[str]] = {}
    for column, value in filters:
        allowed_values.setdefault(column, []).append(value)
    return tuple((column, tuple(values)) for column, values in sorted(allowed_values.items()))


class PgvectorRetriever:
    """Searches a table of PostgreSQL by vector distance.

    Args:
        spec: The address of the database, with the fields of `TableSpec` as parameters.
        embedder: An embedding model to use instead of the one that the spec names.
    """

    name = "pgvector"

    def __init__(self, spec: str, embedder: Embedder | None = None):
        self._address, self._spec = parse_table_spec(spec)
        self._database = open_postgres(self._address, None, SCAN_SETTINGS)
        self.embedder = embedder or load_embedder(self._spec.embedder)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the settings and the rows of the table.

        A `version` in the spec replaces the rows.
        """
        content = self._spec.version or self._compute_content_hash()
        return sha256_text(self.name, repr(self._spec), self.embedder.fingerprint, content)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to k passages for each query, nearest first."""
        check_k(k)
        if not queries:
            return []
        vectors = check_vectors(self.embedder.embed([to_storable_text(query) for query in queries]), len(queries))
        self._check_width(vectors.shape[1])
        return [self._find_nearest(format_vector(vector), k) for vector in vectors]

    def _find_nearest(self, vector: str, k: int) -> list[Passage]:
        """Return the passages nearest to a vector.

        If an approximate search finds fewer than k rows, an exact search follows.
        """
        rows = self._select_rows(vector, k, exact=False)
        if len(rows) < k:
            rows = self._select_rows(vector, k, exact=True)
        # A row is (id, text, title, distance). Rows with equal distances are sorted by id, so the order is repeatable.
        rows.sort(key=lambda row: (row[3], str(row[0])))
        _, max_score = DISTANCES[self._spec.distance]  # a score is this number minus the distance
        return [
            Passage(str(row_id), str(text), str(title or ""), score=max_score - float(distance))
            for row_id, text, title, distance in rows
        ]

    def _select_rows(self, vector: str, k: int, *, exact: bool) -> list[tuple[Any, ...]]:
        """Return id, text, title and distance of the k nearest rows.

        Args:
            vector: The query vector in pgvector's text format.
            k: The number of rows.
            exact: Read all rows. Otherwise PostgreSQL may use an approximate index.
        """
        spec = self._spec
        distance = f"{_quote(spec.vector)} {DISTANCES[spec.distance][0]} ?::{self._vector_type}"
        if exact:
            distance = f"({distance}) + 0"  # PostgreSQL cannot use an index to sort by a sum
        title = _quote(spec.title) if spec.title else "''"
        query = (
            f"SELECT {_quote(spec.id)}, {_quote(spec.text)}, {title}, {distance} AS distance "
            f"FROM {spec.quoted_table} WHERE {self._condition} ORDER BY distance LIMIT ?"
        )
        return self._database.read(query, [vector, *self._condition_values, k])

    @property
    def _condition(self) -> str:
        """The SQL condition that rows must meet: text and vector are present, and the filters match."""
        conditions = [f"{_quote(name)} IS NOT NULL" for name in (self._spec.text, self._spec.vector)]
        conditions += [f"{_quote(column)}::text = ANY(?)" for column, _ in self._spec.filters]
        return " AND ".join(conditions)

    @property
    def _condition_values(self) -> list[Any]:
        """The values for the placeholders of `_condition`: the allowed values of each filtered column."""
        return [[to_storable_text(value) for value in values] for _, values in self._spec.filters]

    @cached_property
    def _column_types(self) -> dict[str, str]:
        """The SQL type of each column of the table."""
        spec = self._spec
        columns = self._database.read(COLUMN_TYPES_QUERY, [spec.quoted_table])
        types = {str(name): str(type_name) for name, type_name in columns}
        if not types:
            raise BadSetting(
                f"pgvector: there is no table '{spec.table}' in {self._address.redacted}. Write table=TABLE or "
                "table=SCHEMA.TABLE, spelled as in the database."
            )
        for column in spec.columns:
            if column not in types:
                raise BadSetting(
                    f"pgvector: the table '{spec.table}' has no column '{column}'. Its columns are: {', '.join(types)}. Name "
                    "your columns in the address with id=, text=, title= and vector=."
                )
        return types

    @cached_property
    def _vector_type(self) -> str:
        """The SQL type of the vector column without schema and size: `vector` or `halfvec`.

        Raises:
            BadSetting: The column has another type.
        """
        spec = self._spec
        vector_type = self._column_types[spec.vector].rpartition(".")[2].partition("(")[0]
        if vector_type not in VECTOR_TYPES:
            raise BadSetting(
                f"pgvector: the column '{spec.vector}' of '{spec.table}' has the type {vector_type} instead of "
                f"{' or '.join(VECTOR_TYPES)}. Name the column that holds the vectors: vector=COLUMN."
            )
        return vector_type

    def _check_width(self, width: int) -> None:
        """Raise BadSetting if the column and the embedding model have different vector sizes."""
        declared = re.search(r"\((\d+)\)", self._column_types[self._spec.vector])
        if declared is not None and int(declared.group(1)) != width:
            raise BadSetting(
                f"pgvector: the column '{self._spec.vector}' holds vectors of {declared.group(1)} numbers. The embedding model "
                f"'{self._spec.embedder}' returns vectors of {width} numbers. Name the embedding model that made the stored "
                "vectors: embedder=NAME."
            )

    def _compute_content_hash(self) -> str:
        """Return the number of rows and the sum of their hashes, to detect changes."""
        spec = self._spec
        texts = [_quote(name) + "::text" for name in (spec.id, spec.text, spec.title) if name]
        # chr(31) is the ASCII unit separator, which does not occur in normal text.
        joined = f"concat_ws(chr(31), {', '.join(texts)})"
        row_hash = f"md5(convert_to({joined}, 'UTF8') || {self._vector_type}_send({_quote(spec.vector)}))"
        # The first 60 bits of the hash as an integer, so that SQL can add them up.
        number = f"('x' || left({row_hash}, 15))::bit(60)::bigint"
        query = f"SELECT count(*), coalesce(sum({number}), 0)::text FROM {spec.quoted_table} WHERE {self._condition}"
        count, total = self._database.read(query, self._condition_values)[0]
        return f"{count} {total}"


def _quote(name: str) -> str:
    """Return an SQL identifier in double quotes; `TableSpec` has checked that it contains none."""
    return f'"{name}"'
