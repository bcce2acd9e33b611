"""The embedding a log is compared by: the one it was filled with, whoever opens it. Knows no rows and no labels."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from knowgate.data.history.entries import KnowledgeLabel, LogEmbedding, LogEntry, question_key
from knowgate.errors import BadSetting
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, SentenceEmbedder
from knowgate.types import Embedder, Neighbor, Vector

NAME_KEY, FINGERPRINT_KEY = (
    "embedder_name",
    "embedder",
)  # in the log's table `meta`; logs of earlier versions have no name


class MetaReader(Protocol):
    """Where a log is kept: an SQLite file or a database."""

    @property
    def path(self) -> Path | str: ...
    def read(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]: ...


class WriteTransaction(Protocol):
    """A transaction that writes."""

    def execute(self, query: str, values: Sequence[Any], /) -> Any: ...


class LogEmbedder:
    """given: an embedding, or the name of one; None for the log's own, which is `minilm` where there is none yet."""

    def __init__(self, db: MetaReader, given: str | Embedder | None = None):
        self._db = db
        self._given = given
        self._is_agreed = False

    def embed(self, texts: Sequence[str]) -> Vector:
        if not self._is_agreed:  # who filled a log first has chosen, once and for all
            self._check(self._kept(FINGERPRINT_KEY))
        return self._embedder.embed(list(texts))

    def agree(self, db: WriteTransaction) -> None:
        """Within a transaction that writes: the first one to fill a log chooses its embedding."""
        db.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT DO NOTHING", [FINGERPRINT_KEY, self._embedder.fingerprint]
        )
        there = db.execute("SELECT value FROM meta WHERE key = ?", [FINGERPRINT_KEY]).fetchone()[0]
        self._check(there)
        if self._name:
            db.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT DO NOTHING", [NAME_KEY, self._name])

    @property
    def kept(self) -> LogEmbedding:
        return LogEmbedding(self._kept(NAME_KEY), self._kept(FINGERPRINT_KEY))

    @property
    def fingerprint(self) -> str:
        return self._embedder.fingerprint

    @cached_property
    def _embedder(self) -> Embedder:
        if self._given is None or isinstance(self._given, str):
            return SentenceEmbedder(self._given or self._kept(NAME_KEY) or DEFAULT_EMBEDDER)
        return self._given

    @property
    def _name(self) -> str:
        """'' for one that was handed over: it cannot be opened by name."""
        return self._embedder.spec if isinstance(self._embedder, SentenceEmbedder) else ""

    def _kept(self, key: str) -> str | None:
        rows = self._db.read("SELECT value FROM meta WHERE key = ?", [key])
        return str(rows[0][0]) if rows else None

    def _check(self, there: str | None) -> None:
        mine = self._embedder.fingerprint
        self._is_agreed = there == mine
        if there in (None, mine):
            return
        path, kept = self._db.path, self._kept(NAME_KEY)
        filled = f"'{kept}'" if kept else f"one of fingerprint {str(there)[:12]}"
        own = "Leave --embedder out to use it" if kept else "Name it with --embedder"
        raise BadSetting(
            f"the log {path} was filled with another embedding ({filled}) than '{self._name or mine[:12]}'. {own}, or "
            f"fill a new log: knowgate history export --history {path} > log.jsonl; "
            f"knowgate history import log.jsonl --history NEW.db --embedder {self._name or DEFAULT_EMBEDDER}"
        )


EXTRA_CANDIDATES = 8  # neighbours fetched beyond k, for those that fall away (the question itself, expired ones)
DEPTH_FACTOR = 4  # times as many are fetched where too many fell away


def select_neighbors(
    question: str, found: Iterable[tuple[LogEntry, float]], leave_out: Collection[KnowledgeLabel]
) -> tuple[Neighbor, ...]:
    """Those that may be shown, with how similar they are, most similar first."""
    own, now = question_key(question), time.time()
    shown = [
        (entry, similarity)
        for entry, similarity in found
        if entry.key != own and not (entry.expires and entry.expires <= now) and entry.label not in leave_out
    ]
    return tuple(deduplicate_neighbors(shown))


def deduplicate_neighbors(entries: Iterable[tuple[LogEntry, float]]) -> list[Neighbor]:
    """The same question by two sources counts once: by the more trusted one."""
    kept: dict[str, Neighbor] = {}
    for entry, similarity in entries:
        rival = kept.get(entry.key)
        if rival is None or entry.trust > rival.weight:
            kept[entry.key] = Neighbor(
                entry.question, entry.label, similarity, entry.outcome, entry.source, entry.trust
            )
    return list(kept.values())


def draw_neighbors(
    ids: Sequence[int], k: int, seed: int, by_id: Callable[[set[int]], dict[int, LogEntry]]
) -> tuple[Neighbor, ...]:
    """k of these entries at random, the same ones for a seed."""
    order = [ids[place] for place in np.random.default_rng(seed).permutation(len(ids))]
    depth = k + EXTRA_CANDIDATES
    while True:
        found = by_id(set(order[:depth]))
        drawn = deduplicate_neighbors([(found[number], 0.0) for number in order[:depth] if number in found])[:k]
        if len(drawn) == k or depth >= len(order):
            return tuple(drawn)
        depth *= DEPTH_FACTOR
