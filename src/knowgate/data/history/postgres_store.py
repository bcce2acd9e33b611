"""The history log in PostgreSQL with pgvector: one log for many machines, with an HNSW index in the database.

A scope (the entries of one model, its prompts and a tenant) of a few thousand entries is searched exactly. Larger scopes
use the index once it is built: it is scanned until enough rows pass the filters. If it finds too few rows, as for a
small scope in a huge table, the search is repeated exactly.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from knowgate.core.postgres import TableSchema, open_postgres
from knowgate.core.postgres.address import format_vector, parse_database_address, to_storable_text
from knowgate.core.postgres.database import PostgresDatabase, WriteTransaction
from knowgate.data.history import store
from knowgate.data.history.entries import (
    ENTRY_COLUMNS,
    INSERT_ENTRY,
    SELECTED_COLUMNS,
    HistoryScope,
    KnowledgeLabel,
    LogEntry,
    entry_to_row,
    question_key,
)
from knowgate.errors import ArtifactError, KnowgateError
from knowgate.retrieval.passages import check_k
from knowgate.types import Embedder, Neighbor, Vector

log = logging.getLogger(__name__)
REMAINS_KEY = "has_remains"  # in the table `meta`, if the table may still hold deleted questions
RETRY_LOCK_SECONDS = 1  # for which a further attempt to vacuum the table may hold up others
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 10.0, 300.0  # before further attempts to vacuum the table
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


class HnswIndex:
    """The HNSW (vector search) index of a log. A thread builds the index when a search first needs it."""

    def __init__(self, database: PostgresDatabase):
        self._database = database
        self._is_ready = False
        self._has_given_up = False
        self._builder: threading.Thread | None = None

    @property
    def is_ready(self) -> bool:
        """Whether searches can use the index now. The first access starts a thread to build a missing index."""
        if self._is_ready or self._has_given_up:
            return self._is_ready
        self._is_ready = self._is_valid()  # another process may have built it
        if not self._is_ready and self._builder is None:
            self._builder = threading.Thread(target=self._build, name="knowgate-hnsw", daemon=True)
            self._builder.start()
        return self._is_ready

    def _is_valid(self) -> bool:
        rows = self._database.read(INDEX_IS_VALID, [f"{self._database.address.schema}.by_vector"])
        return bool(rows and rows[0][0])

    def _build(self) -> None:
        """Build the index of the history log, if no other process has built it.

        Without an index, searches are exact and slow.
        """
        try:
            width_rows = self._database.read("SELECT value FROM meta WHERE key = 'width'")  # the length of a vector
            # Without a width, no vector is stored yet. Vectors that are too long cannot be indexed.
            self._has_given_up = not width_rows or int(width_rows[0][0]) > MAX_HNSW_WIDTH
            if not self._has_given_up and not self._is_valid():
                # With the lock, only one process builds the index at a time.
                self._database.execute_outside_transaction(BUILD_STATEMENTS, log.info, lock="graph")
        except KnowgateError as error:
            self._has_given_up = True
            log.warning("The log has no vector index, so searches are exact and slower: %s", error)
        self._builder = None  # the thread that runs this method ends here


class PostgresHistory(store.HistoryStore):
    """A history log in PostgreSQL: earlier questions, labeled as known or unknown.

    Args:
        address: 'postgresql://USER@HOST/DATABASE?schema=NAME'; the default schema is `knowgate`.
        embedder: An embedding or its name (`minilm`, `mpnet`, `m3e`, a hub name, a folder, `openai:MODEL@URL`);
            None for the one that the log was filled with.
        exact_rows: Search scopes up to this size exactly.
    """

    eraser_pauses = FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS
    vector_column = "vector::real[]"
    listed_id_condition = "id IN (SELECT value::bigint FROM json_array_elements_text(?::json))"
    text_condition = "strpos(lower(question), lower(?)) > 0"
    _database: PostgresDatabase

    def __init__(self, address: str, embedder: str | Embedder | None = None, *, exact_rows: int = EXACT_SCOPE_ROWS):
        super().__init__(open_postgres(parse_database_address(address), HISTORY_TABLES, HNSW_SETTINGS), embedder)
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
        rows = []
        for entry, vector in zip(entries, vectors, strict=True):
            values = [self._encode_text(value) if isinstance(value, str) else value for value in entry_to_row(entry)]
            rows.append([*values, format_vector(vector)])

        def insert(transaction: WriteTransaction) -> None:
            """Insert all rows, and record the embedding of their vectors."""
            self._record_embedding(transaction)
            self._set_width(transaction, len(vectors[0]))
            transaction.executemany(INSERT_ENTRY, rows)

        self._database.write(insert)

    def _set_width(self, transaction: WriteTransaction, width: int) -> None:
        """Declare the length of the vectors when the first entry is added. The HNSW index needs this length."""
        result = transaction.execute("INSERT INTO meta VALUES ('width', ?) ON CONFLICT DO NOTHING", [str(width)])
        if result.rowcount:
            transaction.execute(f"ALTER TABLE entries ALTER COLUMN vector TYPE vector({width:d})")
            if width <= MAX_INLINE_WIDTH:  # short vectors are stored in the row itself, where they are read fastest
                transaction.execute("ALTER TABLE entries ALTER COLUMN vector SET STORAGE PLAIN")

    def _erase(self, ids: Sequence[int]) -> None:
        with self._erasing_lock:
            is_erased = self._database.vacuum(["entries"], log.warning)
            self._set_remains(not is_erased)
            if not is_erased:
                self._start_eraser()

    def _try_to_erase(self) -> bool:
        return self._database.vacuum(["entries"], log.warning, RETRY_LOCK_SECONDS)

    @property
    def has_remains(self) -> bool:
        """Whether the table may still hold questions that any process deleted. If so, this process tries to erase them, too."""
        has_remains = self._read_meta(REMAINS_KEY) is not None
        if has_remains:
            self._start_eraser()
        return has_remains

    def _set_remains(self, has_remains: bool) -> None:
        def write(transaction: WriteTransaction) -> None:
            transaction.execute("DELETE FROM meta WHERE key = ?", [REMAINS_KEY])
            if has_remains:
                transaction.execute("INSERT INTO meta VALUES (?, 'yes')", [REMAINS_KEY])

        self._database.write(write)

    # --- reading ----------------------------------------------------------------------------------

    def search(
        self, questions: Sequence[str], k: int, scope: HistoryScope, exclude: Collection[KnowledgeLabel] = ()
    ) -> list[tuple[Neighbor, ...]]:
        """Find the k most similar logged questions for each question. Expired and excluded entries are left out."""
        check_k(k)
        size = self._count_up_to_limit(scope)
        if not size:
            return [() for _ in questions]
        texts = [self._encode_text(question) for question in questions]
        vectors = map(format_vector, self.embed(texts))
        is_exact = size <= self._exact_rows or not self._hnsw.is_ready
        return [
            self._find_neighbors(question_key(text), vector, k, scope, exclude, is_exact)
            for text, vector in zip(texts, vectors, strict=True)
        ]

    def _count_up_to_limit(self, scope: HistoryScope) -> int:
        """Count the entries of a scope up to `exact_rows` + 1, because counting all of a large scope is slow.

        Large scopes are remembered and not counted again.
        """
        if scope not in self._large_scopes:
            query = f"SELECT count(*) FROM (SELECT 1 FROM entries WHERE {store.IN_SCOPE} LIMIT ?) AS first_rows"
            size = int(self._database.read(query, [*self._scope_values(scope), self._exact_rows + 1])[0][0])
            if size <= self._exact_rows:
                return size
            self._large_scopes.add(scope)
        return self._exact_rows + 1

    def _find_neighbors(
        self, key: str, vector: str, k: int, scope: HistoryScope, exclude: Collection[KnowledgeLabel], is_exact: bool
    ) -> tuple[Neighbor, ...]:
        """Find the k logged questions that are most similar to a question.

        Args:
            key: Key of the question, which is itself left out.
            vector: Its embedding, as PostgreSQL writes vectors.
            k: Number of neighbors.
            scope: Entries to search.
            exclude: Labels to leave out.
            is_exact: True reads all entries of the scope. False uses the approximate index, and reads all entries only
                if the index returns too few.
        """
        # The operator <#> is the negative inner product, which is minus the cosine similarity of unit vectors.
        # PostgreSQL does not use the index to order by a sum, so adding zero makes the search exact.
        distance = "(vector <#> ?::vector) + 0" if is_exact else "vector <#> ?::vector"
        query = (
            f"SELECT {SELECTED_COLUMNS}, {distance} AS distance FROM entries WHERE {store.IN_SCOPE} "
            f"AND {store.NOT_EXPIRED} AND label <> ALL(?) AND key <> ? ORDER BY distance LIMIT ?"
        )
        labels = [str(label) for label in exclude]
        depth = k * store.MAX_ENTRIES  # a question may have several entries, of which only one is kept
        values = [vector, *self._scope_values(scope), time.time(), labels, key, depth]
        rows = self._database.read(query, values)
        if len(rows) < depth and not is_exact:
            return self._find_neighbors(key, vector, k, scope, exclude, is_exact=True)
        return self._convert_to_neighbors(rows)[:k]

    def _convert_to_neighbors(self, rows: list[tuple[Any, ...]]) -> tuple[Neighbor, ...]:
        """Convert rows with the distance in the last column to neighbors, nearest first."""
        ordered = sorted(rows, key=lambda row: (row[-1], row[0]))  # ties by id, so that the order is repeatable
        candidates = [(self._parse_entry(row[:-1]), -float(row[-1])) for row in ordered]
        return tuple(store.deduplicate_neighbors(candidates))

    def _encode_text(self, text: str) -> str:
        return to_storable_text(text)

    def _parse_vectors(self, values: Sequence[Any]) -> Vector:
        return np.asarray(values, np.float32) if values else np.empty((0, 0), np.float32)

    def _make_error(self, problem: str) -> Exception:
        return ArtifactError(f"the log {self.path} cannot be used: {problem}. Nothing was changed. Restore a backup.")
