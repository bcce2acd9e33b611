"""Which of the entries that a store found may be shown, and each question once. Knows no database."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from knowgate.history.entries import Known, LogEntry, question_key
from knowgate.types import Neighbour

EXTRA = 8  # neighbours fetched beyond k, for those that fall away (the question itself, expired ones)
DEEPER = 4  # times as many are fetched where too many fell away


def neighbours(
    question: str, found: Iterable[tuple[LogEntry, float]], leave_out: Collection[Known]
) -> tuple[Neighbour, ...]:
    """Those that may be shown, with how similar they are, most similar first."""
    own, now = question_key(question), time.time()
    shown = [
        (entry, similarity)
        for entry, similarity in found
        if entry.key != own and not (entry.expires and entry.expires <= now) and entry.label not in leave_out
    ]
    return tuple(once(shown))


def once(entries: Iterable[tuple[LogEntry, float]]) -> list[Neighbour]:
    """The same question by two sources counts once: by the more trusted one."""
    kept: dict[str, Neighbour] = {}
    for entry, similarity in entries:
        rival = kept.get(entry.key)
        if rival is None or entry.trust > rival.weight:
            kept[entry.key] = Neighbour(
                entry.question, entry.label, similarity, entry.outcome, entry.source, entry.trust
            )
    return list(kept.values())


def draw(
    ids: Sequence[int], k: int, seed: int, by_id: Callable[[set[int]], dict[int, LogEntry]]
) -> tuple[Neighbour, ...]:
    """k of these entries at random, the same ones for a seed."""
    order = [ids[place] for place in np.random.default_rng(seed).permutation(len(ids))]
    depth = k + EXTRA
    while True:
        found = by_id(set(order[:depth]))
        drawn = once([(found[number], 0.0) for number in order[:depth] if number in found])[:k]
        if len(drawn) == k or depth >= len(order):
            return tuple(drawn)
        depth *= DEEPER
