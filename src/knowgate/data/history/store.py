"""The base class of history logs: everything that the SQLite and PostgreSQL logs share."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from knowgate.data.history.entries import (
    SELECTED_COLUMNS,
    HistoryScope,
    KnowledgeLabel,
    LabelSource,
    LogEntry,
    RetrievalOutcome,
    entry_from_row,
)
from knowgate.errors import BadInput, BadSetting, KnowgateError
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, RemoteEmbedder, SentenceEmbedder, load_embedder
from knowgate.types import Embedder, Neighbor, Vector

NAME_KEY = "embedder_name"  # keys in the table `meta`; older logs have no name
FINGERPRINT_KEY = "embedder"
PAGE_ROWS = 1_000  # entries read at a time
MAX_ID = 2**63 - 1
COPY_BATCH = 500  # entries copied per transaction
MAX_ENTRIES = len(LabelSource)  # of a question in a scope: one per source
NOT_EXPIRED = "(expires IS NULL OR expires > ?)"
IN_SCOPE = "tenant = ? AND model = ? AND prompts = ?"
SELECT_META = "SELECT value FROM meta WHERE key = ?"
INSERT_META = "INSERT INTO meta VALUES (?, ?) ON CONFLICT DO NOTHING"


class SqlDatabase(Protocol):
    """A database (SQLite or PostgreSQL) with read queries and write transactions."""

    @property
    def path(self) -> Path | str: ...
    def read(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]: ...
    def transaction(self) -> AbstractContextManager[Any]: ...
    def close(self) -> None: ...


class HistoryStore:
    """A log of labeled questions with nearest-neighbor search.

    Several processes may write to the log. This base class has the SQL that SQLite and PostgreSQL share.

    Attributes:
        eraser_pauses: Seconds before the first further attempt to erase deleted rows, and at most.
        vector_column: SQL expression that reads a vector.
        listed_id_condition: SQL condition for rows whose id is in a JSON list.
        text_condition: SQL condition for questions that contain a text, in upper or lower case.

    Args:
        database: Database of the log.
        embedder: An embedding or its name; None for the one of the log ('minilm' for a new log).
    """

    eraser_pauses: ClassVar[tuple[float, float]]
    vector_column: ClassVar[str]
    listed_id_condition: ClassVar[str]
    text_condition: ClassVar[str]

    def __init__(self, database: SqlDatabase, embedder: str | Embedder | None):
        self._database = database
        self._erasing_lock = threading.Lock()
        self._eraser: threading.Thread | None = None
        self._has_remains = False
        self._given_embedder = embedder
        self._is_embedder_checked = False

    # --- embedding --------------------------------------------------------------------------------

    @property
    def embedding_name(self) -> str | None:
        """Name of the embedding that the log was filled with; None for an empty log or an embedding object."""
        return self._read_meta(NAME_KEY)

    @property
    def embedding_fingerprint(self) -> str | None:
        """Fingerprint of the embedding that the log was filled with; None for an empty log."""
        return self._read_meta(FINGERPRINT_KEY)

    def embed(self, questions: Sequence[str]) -> Vector:
        """Embed questions. The first call checks that the log was filled with the same embedding model."""
        if not self._is_embedder_checked:
            self._check_embedding(self.embedding_fingerprint)
        return self._embedder.embed(list(questions))

    @cached_property
    def _embedder(self) -> Embedder:
        """The given embedding, or that of the log, or the default. Loaded on first use."""
        if self._given_embedder is None or isinstance(self._given_embedder, str):
            return load_embedder(self._given_embedder or self.embedding_name or DEFAULT_EMBEDDER)
        return self._given_embedder

    @property
    def _embedder_name(self) -> str:
        """Name under which the embedding can be loaded; "" for an embedding object."""
        return self._embedder.spec if isinstance(self._embedder, SentenceEmbedder | RemoteEmbedder) else ""

    def _record_embedding(self, transaction: Any) -> None:
        """Record the embedding of the log. Another recorded embedding is an error."""
        # INSERT_META does nothing if the key exists, so the fingerprint that is then read may be an older one.
        transaction.execute(INSERT_META, [FINGERPRINT_KEY, self._embedder.fingerprint])
        self._check_embedding(transaction.execute(SELECT_META, [FINGERPRINT_KEY]).fetchone()[0])
        if self._embedder_name:
            transaction.execute(INSERT_META, [NAME_KEY, self._embedder_name])

    def _check_embedding(self, stored: str | None) -> None:
        """Raise BadSetting if the log was filled with another embedding. After a match, the check is not repeated.

        Args:
            stored: Fingerprint of the embedding that the log was filled with; None for an empty log.
        """
        fingerprint = self._embedder.fingerprint
        self._is_embedder_checked = stored == fingerprint
        if stored in (None, fingerprint):
            return
        path = self._database.path
        name = self.embedding_name
        filled_with = f"'{name}'" if name else f"one with fingerprint {str(stored)[:12]}"
        advice = "Leave `embedder` out to use it" if name else "Give it as `embedder`"
        raise BadSetting(
            f"the log {path} contains vectors of another embedding model ({filled_with}). They cannot be compared "
            f"with those of '{self._embedder_name or fingerprint[:12]}'. {advice}, or convert the log to this "
            f"`embedder`: knowgate history copy {path} NEW.db"
        )

    def _read_meta(self, key: str) -> str | None:
        rows = self._database.read(SELECT_META, [key])
        return str(rows[0][0]) if rows else None

    # --- writing ----------------------------------------------------------------------------------

    def add(self, entries: Sequence[LogEntry], vectors: Vector | None = None) -> int:
        """Add entries to the log. Older entries with the same question, scope and source are replaced.

        Args:
            entries: The entries.
            vectors: Embedding of each question; None to compute them.

        Returns:
            The number of entries.
        """
        if not entries:
            return 0
        if vectors is None:
            vectors = self.embed([entry.question for entry in entries])
        self._write(entries, vectors)
        return len(entries)

    def forget(self, *, ids: Sequence[int] = (), contains: str | None = None) -> int:
        """Delete entries for good, with their vectors and with the copies that the database files still hold.

        Args:
            ids: Delete the entries with these ids.
            contains: Also delete all entries whose question contains this text; None deletes none by text.

        Returns:
            The number of deleted entries.
        """
        n_deleted = self._delete(self.listed_id_condition, [json.dumps(list(ids))]) if ids else 0
        if contains:
            n_deleted += self._delete(self.text_condition, [self._encode_text(contains)])
        return n_deleted

    def prune(self, *, keep_scope: HistoryScope | None = None) -> int:
        """Delete expired and outdated entries, and return their number.

        Args:
            keep_scope: The scope in use. Entries of its tenant with another model or other prompts are outdated. None
                deletes expired entries only.
        """
        n_deleted = self._delete("expires <= ?", [time.time()])
        if keep_scope is not None:
            condition = "tenant = ? AND NOT (model = ? AND prompts = ?)"
            n_deleted += self._delete(condition, self._scope_values(keep_scope))
        return n_deleted

    def _delete(self, condition: str, values: Sequence[Any]) -> int:
        """Delete the rows that match an SQL condition, and return their number.

        `_erase` removes leftover data from the database files.
        """
        with self._database.transaction() as transaction:
            rows = transaction.execute(f"SELECT id FROM entries WHERE {condition}", values).fetchall()
            transaction.execute(f"DELETE FROM entries WHERE {condition}", values)
        if rows:
            self._erase([row[0] for row in rows])
        return len(rows)

    # --- reading ----------------------------------------------------------------------------------

    def entries(self, scope: HistoryScope | None = None, limit: int | None = None) -> Iterator[LogEntry]:
        """Yield entries, newest first, read in pages of `PAGE_ROWS` rows.

        Args:
            scope: Yield only the entries of this model, prompts and tenant; None for all.
            limit: Maximum number of entries; None for all.
        """
        condition, values = ("true", []) if scope is None else (IN_SCOPE, self._scope_values(scope))
        query = f"SELECT {SELECTED_COLUMNS} FROM entries WHERE {condition} AND id < ? ORDER BY id DESC LIMIT ?"
        remaining = MAX_ID if limit is None else limit
        before_id = MAX_ID
        while remaining > 0:
            rows = self._database.read(query, [*values, before_id, min(remaining, PAGE_ROWS)])
            yield from (self._parse_entry(row) for row in rows)
            if len(rows) < PAGE_ROWS:
                return
            before_id = rows[-1][0]  # the lowest id of this page
            remaining -= len(rows)

    def batches(self, size: int = 1000) -> Iterator[tuple[list[LogEntry], Vector]]:
        """Yield all entries with their vectors in batches of at most `size`, oldest first."""
        query = f"SELECT {SELECTED_COLUMNS}, {self.vector_column} FROM entries WHERE id > ? ORDER BY id LIMIT ?"
        last_id = 0
        while rows := self._database.read(query, [last_id, size]):
            last_id = rows[-1][0]  # the highest id of this batch
            yield [self._parse_entry(row[:-1]) for row in rows], self._parse_vectors([row[-1] for row in rows])

    def scopes(self) -> dict[HistoryScope, int]:
        """Return the number of entries of each scope."""
        query = "SELECT model, prompts, tenant, count(*) FROM entries GROUP BY model, prompts, tenant"
        rows = self._database.read(query, [])
        return {HistoryScope(model, prompts, tenant): count for model, prompts, tenant, count in rows}

    def find_ids(self, key: str) -> list[int]:
        """Return the row ids of all entries of a question, in every scope. `key` is its `question_key`."""
        return [row[0] for row in self._database.read("SELECT id FROM entries WHERE key = ? ORDER BY id", [key])]

    def count(self, scope: HistoryScope) -> int:
        """Return the number of entries of a scope."""
        query = f"SELECT count(*) FROM entries WHERE {IN_SCOPE}"
        return int(self._database.read(query, self._scope_values(scope))[0][0])

    def outcomes(self, scope: HistoryScope) -> tuple[list[RetrievalOutcome], Vector]:
        """Return the recorded effects of retrieval in a scope, with the vectors of the questions."""
        condition = f"{IN_SCOPE} AND outcome IS NOT NULL AND {NOT_EXPIRED}"
        query = f"SELECT outcome, {self.vector_column} FROM entries WHERE {condition} ORDER BY id"
        rows = self._database.read(query, [*self._scope_values(scope), time.time()])
        if invalid := [row[0] for row in rows if row[0] not in list(RetrievalOutcome)]:
            raise self._make_error(f"an outcome must be better, worse or same, not {str(invalid[0])[:40]!r}")
        return [RetrievalOutcome(row[0]) for row in rows], self._parse_vectors([row[1] for row in rows])

    def sample(self, k: int, scope: HistoryScope, exclude: Collection[KnowledgeLabel] = ()) -> tuple[Neighbor, ...]:
        """Draw k logged questions of a scope at random. The same log gives the same questions.

        They serve as examples when no similar questions are known (cold start).
        """
        query = f"SELECT id, label FROM entries WHERE {IN_SCOPE} AND {NOT_EXPIRED} ORDER BY id"
        rows = self._database.read(query, [*self._scope_values(scope), time.time()])
        ids = [row_id for row_id, label in rows if label not in exclude]
        shuffled = [ids[index] for index in np.random.default_rng(0).permutation(len(ids))]
        drawn = shuffled[: k * MAX_ENTRIES]  # a question may have several entries, of which only one is kept
        entries = self._load_entries(drawn)
        candidates = [(entries[row_id], 0.0) for row_id in drawn if row_id in entries]
        return tuple(deduplicate_neighbors(candidates)[:k])

    def _load_entries(self, ids: Iterable[int]) -> dict[int, LogEntry]:
        """Load entries by row id, without deleted ones."""
        query = f"SELECT {SELECTED_COLUMNS} FROM entries WHERE {self.listed_id_condition}"
        rows = self._database.read(query, [json.dumps(list(ids))])
        return {row[0]: self._parse_entry(row) for row in rows}

    def close(self) -> None:
        """Close the connections to the database: all to PostgreSQL, those of this thread to SQLite. Later calls reopen them."""
        self._database.close()

    def _parse_entry(self, row: Sequence[Any]) -> LogEntry:
        """Parse a row of the table. An invalid row means a damaged log."""
        try:
            return entry_from_row(row)
        except BadInput as error:
            raise self._make_error(str(error)) from None

    def _scope_values(self, scope: HistoryScope) -> list[str]:
        return [self._encode_text(text) for text in (scope.tenant, scope.model, scope.prompts)]

    # --- what differs between databases -----------------------------------------------------------

    def search(
        self, questions: Sequence[str], k: int, scope: HistoryScope, exclude: Collection[KnowledgeLabel] = ()
    ) -> list[tuple[Neighbor, ...]]:
        """Find the k most similar logged questions for each question. Expired and excluded entries are left out."""
        raise NotImplementedError

    def _write(self, entries: Sequence[LogEntry], vectors: Vector) -> None:
        """Insert entries, or replace those that exist."""
        raise NotImplementedError

    @property
    def has_remains(self) -> bool:
        """Whether files of the log may still hold deleted questions, because another process uses them.

        They are erased soon after it ends.
        """
        return self._has_remains

    def _set_remains(self, has_remains: bool) -> None:
        """Store whether files of the log may still hold deleted questions."""
        self._has_remains = has_remains

    def _start_eraser(self) -> bool:
        """Start a thread that tries again to erase deleted rows. Return False if it already runs."""
        if self._eraser is not None:
            return False
        self._eraser = threading.Thread(target=self._erase_later, name="knowgate-erase", daemon=True)
        self._eraser.start()
        return True

    def _erase_later(self) -> None:
        """Try to erase deleted rows until this succeeds. Runs in a thread."""
        pause, max_pause = self.eraser_pauses
        while self._eraser is not None:
            time.sleep(pause)
            pause = min(2 * pause, max_pause)
            with self._erasing_lock, contextlib.suppress(KnowgateError):
                if self._try_to_erase():
                    self._set_remains(False)
                    self._eraser = None

    def _try_to_erase(self) -> bool:
        """Erase leftover data of deleted rows. Return whether that succeeded."""
        raise NotImplementedError

    def _erase(self, ids: Sequence[int]) -> None:
        """Remove what deleted rows left in the files of the log."""
        raise NotImplementedError

    def _encode_text(self, text: str) -> str:
        """Return the text as the database stores it."""
        return text

    def _parse_vectors(self, values: Sequence[Any]) -> Vector:
        raise NotImplementedError

    def _make_error(self, problem: str) -> Exception:
        raise NotImplementedError


def copy_history(source: HistoryStore, target: HistoryStore) -> int:
    """Copy all entries of a log into another log. If the embeddings differ, the vectors are computed again.

    Returns:
        The number of copied entries.
    """
    count = 0
    has_same_embedding: bool | None = None  # set with the first batch: copying an empty log loads no embedding
    for entries, vectors in source.batches(COPY_BATCH):
        if has_same_embedding is None:
            has_same_embedding = source.embedding_fingerprint == target._embedder.fingerprint
        count += target.add(entries, vectors if has_same_embedding else None)
    return count


def deduplicate_neighbors(candidates: Iterable[tuple[LogEntry, float]]) -> list[Neighbor]:
    """Keep one neighbor per question: the entry with the most trusted label.

    Args:
        candidates: Pairs of an entry and its similarity to the current question.
    """
    by_key: dict[str, Neighbor] = {}
    for entry, similarity in candidates:
        earlier = by_key.get(entry.key)
        if earlier is None or entry.trust > earlier.weight:
            by_key[entry.key] = Neighbor(
                entry.question, entry.label, similarity, entry.outcome, entry.source, weight=entry.trust
            )
    return list(by_key.values())
