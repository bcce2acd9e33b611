"""The log in PostgreSQL with pgvector: one log for many machines, nearest questions by a graph (HNSW) in the database.

A scope of a few thousand entries is searched exactly, as is all while there is no graph. In larger ones it is walked
on until enough rows pass the filters (iterative scans); where even that finds too few, as for a small scope in a huge
table, it is exact again. Knows vectors and rows; not what the labels are used for.
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
from knowgate.data.history.entries import (
    INSERT_ENTRY,
    SELECTED_COLUMNS,
    HistoryScope,
    KnowledgeLabel,
    LogEmbedding,
    LogEntry,
    RetrievalOutcome,
    entry_from_row,
    entry_to_row,
)
from knowgate.data.history.similarity import (
    DEPTH_FACTOR,
    EXTRA_CANDIDATES,
    LogEmbedder,
    draw_neighbors,
    select_neighbors,
)
from knowgate.data.history.sqlite_connection import ENTRY_COLUMNS
from knowgate.errors import ArtifactError, BadInput, BadSetting, KnowgateError
from knowgate.types import Embedder, Neighbor, Vector

MAX_HNSW_WIDTH = 2_000  # pgvector's limit for HNSW over 32-bit numbers; wider vectors are searched exactly
INDEX_IS_VALID = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(?)"
BUILD_STATEMENTS = (
    "SET maintenance_work_mem = '256MB'",
    "DROP INDEX CONCURRENTLY IF EXISTS by_vector",  # what is left of one that was cut off
    "CREATE INDEX CONCURRENTLY by_vector ON entries USING hnsw (vector vector_ip_ops)",
    "ANALYZE entries",  # else the planner takes every scope for a small one and sorts it
)
log = logging.getLogger(__name__)


class HnswIndex:
    """Of one log, as this process knows it."""

    def __init__(self, db: PostgresDatabase):
        self._db = db
        self._ready = False
        self._builder: threading.Thread | None = None
        self._gave_up = False

    @property
    def is_there(self) -> bool:
        """Whether it can be used. Asked for the first time it is begun."""
        if self._ready or self._gave_up:
            return self._ready
        self._ready = self._is_valid
        if not self._ready and self._builder is None:
            self._builder = threading.Thread(target=self._build, name="knowgate-graph", daemon=True)
            self._builder.start()
        return self._ready

    def wait(self) -> None:
        """Until the one that is being built, if any, is ready."""
        builder = self._builder
        if builder is not None:
            builder.join()

    @property
    def _is_valid(self) -> bool:
        rows = self._db.read(INDEX_IS_VALID, [f"{self._db.address.schema}.by_vector"])
        return bool(rows and rows[0][0])

    def _build(self) -> None:
        try:
            width = self._db.read("SELECT value FROM meta WHERE key = 'width'")
            self._gave_up = not width or int(width[0][0]) > MAX_HNSW_WIDTH
            if not self._gave_up and not self._is_valid:
                self._db.execute_outside_transaction(BUILD_STATEMENTS, log.info, lock="graph")
        except KnowgateError as error:
            self._gave_up = True
            log.warning("There is no graph over the log, so it is searched exactly, which takes longer: %s", error)
        self._builder = None


MAX_INLINE_WIDTH = 1_500  # with its vector in it a row must fit a page of 8 kB
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


NOT_EXPIRED = "(expires IS NULL OR expires > ?)"
IN_SCOPE = "tenant = ? AND model = ? AND prompts = ?"
EXACT_SCOPE_ROWS = 5_000  # of a scope: reading and sorting 3,000 of 384 numbers takes the database 4 ms
PAGE_ROWS = 1_000  # rows read at a time
# of random vectors, which are the hardest, the default of 40 misses too many; then on until enough pass the filters
HNSW_SETTINGS = (("hnsw.iterative_scan", "relaxed_order"), ("hnsw.ef_search", "120"))


class PostgresHistory:
    """A log at an address such as 'postgresql://USER@HOST/DATABASE?schema=NAME'; the schema is `knowgate` by default.

    embedder: an embedding or its name (`minilm`, `mpnet`, `m3e`, a hub name, a folder); None for the log's own.
    """

    def __init__(self, address: str, embedder: str | Embedder | None = None, *, exact_rows: int = EXACT_SCOPE_ROWS):
        self._db = open_postgres(parse_database_address(address), HISTORY_TABLES, HNSW_SETTINGS)
        self._embedder = LogEmbedder(self._db, embedder)
        self._exact_rows = exact_rows
        self._graph = HnswIndex(self._db)
        self._large: set[HistoryScope] = set()

    @property
    def path(self) -> str:
        """Without the password."""
        return self._db.path

    @property
    def is_made(self) -> bool:
        """Whether there is such a log; looking makes none."""
        return self._db.has_tables

    @property
    def embedding(self) -> LogEmbedding:
        """What it was filled with."""
        return self._embedder.kept

    def compares_by(self, embedding: LogEmbedding) -> bool:
        """Whether vectors of that embedding are such as this log compares by."""
        return embedding.fingerprint == self._embedder.fingerprint

    # --- writing ----------------------------------------------------------------------------------

    def add(self, entries: Sequence[LogEntry], vectors: Vector | None = None) -> int:
        """Log entries; one that was logged before in the same scope by the same source is replaced."""
        if not entries:
            return 0
        if vectors is None:
            vectors = self._embedder.embed([entry.question for entry in entries])
        rows = [_row(entry, vector) for entry, vector in zip(entries, vectors, strict=True)]
        self._db.write(lambda db: self._put(db, rows, len(vectors[0])))
        return len(rows)

    def _put(self, db: WriteTransaction, rows: Sequence[Sequence[Any]], width: int) -> None:
        self._embedder.agree(db)
        self._widen(db, width)
        db.executemany(INSERT_ENTRY, rows)

    def _widen(self, db: WriteTransaction, width: int) -> None:
        """The first one to fill a log says how wide its vectors are: a graph needs to know."""
        made = db.execute("INSERT INTO meta VALUES ('width', ?) ON CONFLICT DO NOTHING", [str(width)])
        if made.rowcount:
            db.execute(f"ALTER TABLE entries ALTER COLUMN vector TYPE vector({width:d})")
            if width <= MAX_INLINE_WIDTH:
                db.execute("ALTER TABLE entries ALTER COLUMN vector SET STORAGE PLAIN")

    def forget(self, *, ids: Sequence[int] = (), contains: str | None = None) -> int:
        """Delete entries and their vectors, and wipe them from the table and the graph."""
        with self._db.transaction() as db:
            count = db.execute("DELETE FROM entries WHERE id = ANY(?)", [list(ids)]).rowcount if ids else 0
            if contains:
                query = "DELETE FROM entries WHERE position(lower(?) IN lower(question)) > 0"
                count += db.execute(query, [to_storable_text(contains)]).rowcount
        if count:
            self._db.vacuum(["entries"], log.warning)
        return int(count)

    def prune(self, *, now: float | None = None, keep_scope: HistoryScope | None = None) -> int:
        """Delete what has expired, and, if a scope is given, what belongs to the same tenant's other models."""
        with self._db.transaction() as db:
            query = "DELETE FROM entries WHERE expires IS NOT NULL AND expires <= ?"
            count = db.execute(query, [now or time.time()]).rowcount
            if keep_scope is not None:
                kept = [keep_scope.tenant, keep_scope.model, keep_scope.prompts]
                query = "DELETE FROM entries WHERE tenant = ? AND NOT (model = ? AND prompts = ?)"
                count += db.execute(query, kept).rowcount
        return int(count)

    # --- reading ----------------------------------------------------------------------------------

    def entries(self, scope: HistoryScope | None = None, limit: int | None = None) -> Iterator[LogEntry]:
        """Newest first."""
        where, values = (IN_SCOPE, _values(scope)) if scope is not None else ("true", [])
        query = f"SELECT {SELECTED_COLUMNS} FROM entries WHERE {where} AND id < ? ORDER BY id DESC LIMIT ?"
        last, left = 2**63 - 1, limit
        while left is None or left > 0:
            rows = self._db.read(query, [*values, last, PAGE_ROWS if left is None else min(left, PAGE_ROWS)])
            yield from (self._entry(row) for row in rows)
            if len(rows) < PAGE_ROWS:
                return
            last, left = rows[-1][0], None if left is None else left - len(rows)

    def batches(self, size: int = PAGE_ROWS) -> Iterator[tuple[list[LogEntry], Vector]]:
        """All entries with their vectors, oldest first."""
        last, query = 0, f"SELECT {SELECTED_COLUMNS}, vector::real[] FROM entries WHERE id > ? ORDER BY id LIMIT ?"
        while rows := self._db.read(query, [last, size]):
            last = rows[-1][0]
            yield [self._entry(row[:-1]) for row in rows], np.asarray([row[-1] for row in rows], np.float32)

    def ids_of(self, key: str) -> list[int]:
        """Entries of a question (see `question_key`), in any scope."""
        return [row[0] for row in self._db.read("SELECT id FROM entries WHERE key = ? ORDER BY id", [key])]

    def scopes(self) -> dict[HistoryScope, int]:
        """How many entries each scope has."""
        rows = self._db.read("SELECT model, prompts, tenant, count(*) FROM entries GROUP BY model, prompts, tenant", [])
        return {HistoryScope(model, prompts, tenant): count for model, prompts, tenant, count in rows}

    def count(self, scope: HistoryScope) -> int:
        return int(self._db.read(f"SELECT count(*) FROM entries WHERE {IN_SCOPE}", _values(scope))[0][0])

    def search(
        self, questions: Sequence[str], k: int, scope: HistoryScope, leave_out: Collection[KnowledgeLabel] = ()
    ) -> list[tuple[Neighbor, ...]]:
        """The k most similar logged questions, most similar first; never the question itself, nothing expired."""
        if k < 1:
            raise BadSetting(f"k is {k}; at least 1 neighbour must be asked for.")
        size = self._size(scope)
        if not size:
            return [() for _ in questions]
        vectors = self._embedder.embed([to_storable_text(question) for question in questions])
        exact = size <= self._exact_rows or not self._graph.is_there
        return [
            self._nearest(question, format_vector(vector), k, scope, leave_out, exact)
            for question, vector in zip(questions, vectors, strict=True)
        ]

    def _size(self, scope: HistoryScope) -> int:
        """How many entries a scope has, counted no further than it matters; a large one is not counted again."""
        if scope not in self._large:
            some = f"SELECT count(*) FROM (SELECT FROM entries WHERE {IN_SCOPE} LIMIT ?) AS few"
            size = int(self._db.read(some, [*_values(scope), self._exact_rows + 1])[0][0])
            if size <= self._exact_rows:
                return size
            self._large.add(scope)
        return self._exact_rows + 1

    def _nearest(
        self,
        question: str,
        vector: str,
        k: int,
        scope: HistoryScope,
        leave_out: Collection[KnowledgeLabel],
        exact: bool,
    ) -> tuple[Neighbor, ...]:
        depth = k + EXTRA_CANDIDATES
        while True:
            found = self._ranked(vector, depth, scope, leave_out, exact)
            near = select_neighbors(to_storable_text(question), found, leave_out)[:k]
            if len(near) == k or (exact and len(found) < depth):
                return near
            exact = exact or len(found) < depth  # the graph gave all it could
            depth = depth if len(found) < depth else depth * DEPTH_FACTOR

    def _ranked(
        self, vector: str, depth: int, scope: HistoryScope, leave_out: Collection[KnowledgeLabel], exact: bool
    ) -> list[tuple[LogEntry, float]]:
        """exact: the sum is no expression that the graph can order by."""
        distance = "(vector <#> ?::vector) + 0" if exact else "vector <#> ?::vector"
        query = (
            f"SELECT {SELECTED_COLUMNS}, {distance} AS distance FROM entries WHERE {IN_SCOPE} AND {NOT_EXPIRED} "
            "AND label <> ALL(?) ORDER BY distance LIMIT ?"
        )
        left_out = [str(label) for label in leave_out]
        rows = self._db.read(query, [vector, *_values(scope), time.time(), left_out, depth])
        rows.sort(key=lambda row: (row[-1], row[0]))
        return [(self._entry(row[:-1]), -float(row[-1])) for row in rows]

    def wait(self) -> None:
        """Until the graph that is being built, if any, is ready."""
        self._graph.wait()

    def embed(self, questions: Sequence[str]) -> Vector:
        """The vectors this log compares by."""
        return self._embedder.embed(questions)

    def outcomes(self, scope: HistoryScope) -> tuple[list[RetrievalOutcome], Vector]:
        """Every entry whose outcome is known and that has not expired, with its vector."""
        query = (
            f"SELECT outcome, vector::real[] FROM entries WHERE {IN_SCOPE} AND outcome IS NOT NULL AND {NOT_EXPIRED} "
            "ORDER BY id"
        )
        rows = self._db.read(query, [*_values(scope), time.time()])
        if wrong := [row[0] for row in rows if row[0] not in list(RetrievalOutcome)]:
            raise self._broken(f"{str(wrong[0])[:40]!r} is no outcome")
        vectors = np.asarray([row[1] for row in rows], np.float32) if rows else np.empty((0, 0), np.float32)
        return [RetrievalOutcome(row[0]) for row in rows], vectors

    def sample(
        self, k: int, scope: HistoryScope, seed: int = 0, leave_out: Collection[KnowledgeLabel] = ()
    ) -> tuple[Neighbor, ...]:
        """k questions at random, the same ones for a seed while the log does not change: DH-ICL's cold start."""
        query = f"SELECT id FROM entries WHERE {IN_SCOPE} AND {NOT_EXPIRED} AND label <> ALL(?) ORDER BY id"
        left_out = [str(label) for label in leave_out]
        ids = [row[0] for row in self._db.read(query, [*_values(scope), time.time(), left_out])]
        return draw_neighbors(ids, k, seed, self._by_id)

    def _by_id(self, ids: set[int]) -> dict[int, LogEntry]:
        rows = self._db.read(f"SELECT {SELECTED_COLUMNS} FROM entries WHERE id = ANY(?)", [sorted(ids)])
        return {row[0]: self._entry(row) for row in rows}

    def _entry(self, row: Sequence[Any]) -> LogEntry:
        try:
            return entry_from_row(row)
        except BadInput as error:
            raise self._broken(str(error)) from None

    def _broken(self, problem: str) -> Exception:
        return ArtifactError(f"the log {self.path} cannot be used: {problem}. It was left as it is; restore it.")

    def close(self) -> None:
        """Let go of the connections; the log can still be used."""
        self._db.close()


def _values(scope: HistoryScope) -> list[Any]:
    return [to_storable_text(scope.tenant), to_storable_text(scope.model), to_storable_text(scope.prompts)]


def _row(entry: LogEntry, vector: Vector) -> list[Any]:
    """As for SQLite, but for texts that PostgreSQL does not know and the vector's form."""
    *values, _ = entry_to_row(entry, vector)
    plain = [value.value if isinstance(value, Enum) else value for value in values]
    return [*(to_storable_text(value) if isinstance(value, str) else value for value in plain), format_vector(vector)]
