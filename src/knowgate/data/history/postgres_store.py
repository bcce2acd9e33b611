"""The history log in PostgreSQL with pgvector: one log for many machines, with an HNSW index in the database.

A scope (the entries of one model, its prompts and a tenant) of a few thousand entries is searched exactly. Larger scopes
use the index once it is built: it is scanned until enough rows pass the filters. If it finds too few rows, as for a
small scope in a huge table, the search is repeated exactly.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from typing import Any

import numpy as np

from knowgate.core.postgres import TableSchema, open_postgres
from knowgate.core.postgres.address import format_vector, parse_database_address, to_storable_text
from knowgate.core.postgres.database import PostgresDatabase, WriteTransaction
from knowgate.data.history import similarity
from knowgate.data.history.entries import (
    INSERT_ENTRY,
    SELECTED_COLUMNS,
    HistoryScope,
    KnowledgeLabel,
    LogEntry,
    entry_to_row,
)
from knowgate.data.history.sqlite_connection import ENTRY_COLUMNS
from knowgate.errors import ArtifactError, KnowgateError
from knowgate.retrieval.passages import check_k
from knowgate.types import Embedder, Neighbor, Vector

log = logging.getLogger(__name__)
MAX_INLINE_WIDTH = 1_500  # a row with its vector must fit a page of 8 kB
# Never change a released migration, because databases have already run it. Add another one.
MIGRATIONS = (
    (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
        """CREATE TABLE entries (
            id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            key TEXT NOT NULL, question TEXT NOT NULL, label TEXT NOT NULL, outcome TEXT, source TEXT NOT NULL,
            weight DOUBLE PRECISION NOT NULL, model TEXT NOT NULL, prompts TEXT NOT NULL, tenant TEXT NOT NULL,
            created DOUBLE PRECISION NOT NULL, expires DOUBLE PRECISION, vector vector NOT NULL,
            UNIQUE (tenant, model, prompts, key, source)
        )""",
        "CREATE INDEX by_scope ON entries (tenant, model, prompts, id)",
    ),
)
HISTORY_TABLES = TableSchema(
    "history", MIGRATIONS, {"meta": frozenset({"key", "value"}), "entries": ENTRY_COLUMNS}, has_vectors=True
)
MAX_HNSW_WIDTH = 2_000  # limit of pgvector for 32-bit numbers; wider vectors are searched exactly
INDEX_IS_VALID = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(?)"
BUILD_STATEMENTS = (
    "SET maintenance_work_mem = '256MB'",
    "DROP INDEX CONCURRENTLY IF EXISTS by_vector",  # an earlier build may have been interrupted
    "CREATE INDEX CONCURRENTLY by_vector ON entries USING hnsw (vector vector_ip_ops)",
    "ANALYZE entries",  # otherwise the planner takes every scope for a small one and sorts it
)
# The default ef_search of 40 misses too many random vectors, which are the hardest case.
HNSW_SETTINGS = (("hnsw.iterative_scan", "relaxed_order"), ("hnsw.ef_search", "120"))
EXACT_SCOPE_ROWS = 5_000  # reading and sorting 3,000 vectors of 384 numbers takes the database 4 ms
PAGE_ROWS = 1_000  # rows read at a time


class HnswIndex:
    """The HNSW index of a log, built in a thread when a search first needs it.

    One process builds it, while others read and write. An interrupted build is started again.
    """

    def __init__(self, database: PostgresDatabase):
        self._database = database
        self._is_ready = False
        self._has_given_up = False
        self._builder: threading.Thread | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the index can be used; if there is none, the first call starts to build it in a thread."""
        if self._is_ready or self._has_given_up:
            return self._is_ready
        self._is_ready = self._is_valid()
        if not self._is_ready and self._builder is None:
            self._builder = threading.Thread(target=self._build, name="knowgate-hnsw", daemon=True)
            self._builder.start()
        return self._is_ready

    def wait(self) -> None:
        """Wait for the builder thread, if there is one."""
        builder = self._builder
        if builder is not None:
            builder.join()

    def _is_valid(self) -> bool:
        rows = self._database.read(INDEX_IS_VALID, [f"{self._database.address.schema}.by_vector"])
        return bool(rows and rows[0][0])

    def _build(self) -> None:
        """Build the index, unless another process has built it.

        Without an index, searches stay exact and slower. That is so if the build fails, if the log is empty, and if the
        vectors are too long for pgvector's index.
        """
        try:
            width = self._database.read("SELECT value FROM meta WHERE key = 'width'")
            self._has_given_up = not width or int(width[0][0]) > MAX_HNSW_WIDTH
            if not self._has_given_up and not self._is_valid():
                self._database.execute_outside_transaction(BUILD_STATEMENTS, log.info, lock="graph")
        except KnowgateError as error:
            self._has_given_up = True
            log.warning("The log has no vector index, so searches are exact and slower: %s", error)
        self._builder = None


class PostgresHistory(similarity.SqlHistory):
    """A history log in PostgreSQL: earlier questions, each with whether the LLM knew the answer.

    Args:
        address: 'postgresql://USER@HOST/DATABASE?schema=NAME'; the default schema is `knowgate`.
        embedder: An embedding or its name (`minilm`, `mpnet`, `m3e`, a hub name, a folder, `openai:MODEL@URL`);
            None for the one that the log was filled with.
        exact_rows: Search scopes up to this size exactly.
    """

    vector_column = "vector::real[]"
    _database: PostgresDatabase

    def __init__(self, address: str, embedder: str | Embedder | None = None, *, exact_rows: int = EXACT_SCOPE_ROWS):
        self._database = open_postgres(parse_database_address(address), HISTORY_TABLES, HNSW_SETTINGS)
        self._embedder = similarity.LogEmbedder(self._database, embedder)
        self._exact_rows = exact_rows
        self._hnsw = HnswIndex(self._database)
        self._large_scopes: set[HistoryScope] = set()

    @property
    def path(self) -> str:
        """Address without the password."""
        return self._database.path

    @property
    def exists(self) -> bool:
        """Whether the tables of the log exist in the database. Does not create them."""
        return self._database.has_tables

    # --- writing ----------------------------------------------------------------------------------

    def _write(self, entries: Sequence[LogEntry], vectors: Vector) -> None:
        rows = [_make_row(entry, vector) for entry, vector in zip(entries, vectors, strict=True)]
        self._database.write(lambda transaction: self._insert(transaction, rows, len(vectors[0])))

    def _insert(self, transaction: WriteTransaction, rows: Sequence[Sequence[Any]], width: int) -> None:
        self._embedder.register(transaction)
        self._set_width(transaction, width)
        transaction.executemany(INSERT_ENTRY, rows)

    def _set_width(self, transaction: WriteTransaction, width: int) -> None:
        """Declare the length of the vectors when the first entry is added, because pgvector's index needs it.

        It depends on the embedding model, so it is not known when the table is created.
        """
        result = transaction.execute("INSERT INTO meta VALUES ('width', ?) ON CONFLICT DO NOTHING", [str(width)])
        if result.rowcount:
            transaction.execute(f"ALTER TABLE entries ALTER COLUMN vector TYPE vector({width:d})")
            if width <= MAX_INLINE_WIDTH:  # short vectors are stored in the row itself, where they are read fastest
                transaction.execute("ALTER TABLE entries ALTER COLUMN vector SET STORAGE PLAIN")

    def forget(self, *, ids: Sequence[int] = (), contains: str | None = None) -> int:
        """Delete entries by id or text, and erase them and their vectors from table and index."""
        with self._database.transaction() as transaction:
            count = transaction.execute("DELETE FROM entries WHERE id = ANY(?)", [list(ids)]).rowcount if ids else 0
            if contains:
                query = "DELETE FROM entries WHERE position(lower(?) IN lower(question)) > 0"
                count += transaction.execute(query, [to_storable_text(contains)]).rowcount
        if count:
            self._database.vacuum(["entries"], log.warning)
        return int(count)

    def prune(self, *, now: float | None = None, keep_scope: HistoryScope | None = None) -> int:
        """Delete expired entries; with `keep_scope`, also the entries of the same tenant for other models or prompts."""
        with self._database.transaction() as transaction:
            query = "DELETE FROM entries WHERE expires IS NOT NULL AND expires <= ?"
            count = transaction.execute(query, [now or time.time()]).rowcount
            if keep_scope is not None:
                values = [keep_scope.tenant, keep_scope.model, keep_scope.prompts]
                query = "DELETE FROM entries WHERE tenant = ? AND NOT (model = ? AND prompts = ?)"
                count += transaction.execute(query, values).rowcount
        return int(count)

    # --- reading ----------------------------------------------------------------------------------

    def entries(self, scope: HistoryScope | None = None, limit: int | None = None) -> Iterator[LogEntry]:
        """Yield entries, newest first. They are read in pages, which end at the id where the next page begins."""
        where, values = (similarity.IN_SCOPE, self._scope_values(scope)) if scope is not None else ("true", [])
        query = f"SELECT {SELECTED_COLUMNS} FROM entries WHERE {where} AND id < ? ORDER BY id DESC LIMIT ?"
        highest_id = 2**63 - 1
        before_id, remaining = highest_id, highest_id if limit is None else limit
        while remaining > 0:
            rows = self._database.read(query, [*values, before_id, min(remaining, PAGE_ROWS)])
            yield from (self._parse_entry(row) for row in rows)
            if len(rows) < PAGE_ROWS:
                return
            before_id, remaining = rows[-1][0], remaining - len(rows)

    def search(
        self, questions: Sequence[str], k: int, scope: HistoryScope, exclude: Collection[KnowledgeLabel] = ()
    ) -> list[tuple[Neighbor, ...]]:
        """Find the k logged questions that are most similar to each question.

        The question itself, expired entries and entries with an excluded label are left out.
        """
        check_k(k)
        size = self._estimate_size(scope)
        if not size:
            return [() for _ in questions]
        vectors = self._embedder.embed([to_storable_text(question) for question in questions])
        is_exact = size <= self._exact_rows or not self._hnsw.is_ready
        return [
            self._find_neighbors(question, format_vector(vector), k, scope, exclude, is_exact)
            for question, vector in zip(questions, vectors, strict=True)
        ]

    def _estimate_size(self, scope: HistoryScope) -> int:
        """Return the number of entries of a scope, but at most `exact_rows` + 1, because counting more would be slow.

        Scopes of up to `exact_rows` entries are searched exactly, so the exact size of larger ones does not matter.
        """
        if scope not in self._large_scopes:
            query = f"SELECT count(*) FROM (SELECT FROM entries WHERE {similarity.IN_SCOPE} LIMIT ?) AS few"
            size = int(self._database.read(query, [*self._scope_values(scope), self._exact_rows + 1])[0][0])
            if size <= self._exact_rows:
                return size
            self._large_scopes.add(scope)
        return self._exact_rows + 1

    def _find_neighbors(
        self,
        question: str,
        vector: str,
        k: int,
        scope: HistoryScope,
        exclude: Collection[KnowledgeLabel],
        is_exact: bool,
    ) -> tuple[Neighbor, ...]:
        """Find the k logged questions that are most similar to a question.

        Entries are fetched until k of them pass the filters of `select_neighbors`. If the vector index cannot return
        enough entries, the search is repeated exactly.

        Args:
            question: The question.
            vector: Its embedding, as PostgreSQL writes vectors.
            k: Number of neighbors.
            scope: Entries to search.
            exclude: Labels to leave out.
            is_exact: Search exactly from the start, without the index.
        """
        depth = k + similarity.EXTRA_CANDIDATES
        while True:
            candidates = self._rank_entries(vector, depth, scope, exclude, is_exact)
            neighbors = similarity.select_neighbors(to_storable_text(question), candidates, exclude)[:k]
            are_all = len(candidates) < depth  # the search returned all entries that it could
            if len(neighbors) == k or (is_exact and are_all):
                return neighbors
            if are_all:
                is_exact = True
            else:
                depth *= similarity.DEPTH_FACTOR

    def _rank_entries(
        self, vector: str, depth: int, scope: HistoryScope, exclude: Collection[KnowledgeLabel], is_exact: bool
    ) -> list[tuple[LogEntry, float]]:
        """Return the `depth` entries nearest to a vector, each with its cosine similarity, nearest first."""
        # The operator <#> is the negative inner product, which is minus the cosine similarity of unit vectors.
        # PostgreSQL does not use the index to order by a sum, so adding zero makes the search exact.
        distance = "(vector <#> ?::vector) + 0" if is_exact else "vector <#> ?::vector"
        query = (
            f"SELECT {SELECTED_COLUMNS}, {distance} AS distance FROM entries WHERE {similarity.IN_SCOPE} "
            f"AND {similarity.NOT_EXPIRED} AND label <> ALL(?) ORDER BY distance LIMIT ?"
        )
        labels = [str(label) for label in exclude]
        rows = self._database.read(query, [vector, *self._scope_values(scope), time.time(), labels, depth])
        rows.sort(key=lambda row: (row[-1], row[0]))  # by distance; ties by id, so that the order is repeatable
        return [(self._parse_entry(row[:-1]), -float(row[-1])) for row in rows]

    def wait(self) -> None:
        """Wait until the index, if it is being built, is ready."""
        self._hnsw.wait()

    def _load_entries(self, ids: set[int]) -> dict[int, LogEntry]:
        rows = self._database.read(f"SELECT {SELECTED_COLUMNS} FROM entries WHERE id = ANY(?)", [sorted(ids)])
        return {row[0]: self._parse_entry(row) for row in rows}

    def _scope_values(self, scope: HistoryScope) -> list[str]:
        return [to_storable_text(value) for value in super()._scope_values(scope)]

    def _parse_vectors(self, values: Sequence[Any]) -> Vector:
        return np.asarray(values, np.float32) if values else np.empty((0, 0), np.float32)

    def _make_error(self, problem: str) -> Exception:
        return ArtifactError(f"the log {self.path} cannot be used: {problem}. Nothing was changed. Restore a backup.")

    def close(self) -> None:
        """Release the connections; the log can still be used."""
        self._database.close()


def _make_row(entry: LogEntry, vector: Vector) -> list[Any]:
    """Convert an entry to values that PostgreSQL can store: plain texts, and the vector in PostgreSQL's notation."""
    row: list[Any] = []
    for value in entry_to_row(entry, vector)[:-1]:  # without the vector as bytes, which is for SQLite
        plain = value.value if isinstance(value, Enum) else value
        row.append(to_storable_text(plain) if isinstance(plain, str) else plain)
    return [*row, format_vector(vector)]
