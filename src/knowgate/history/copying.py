"""A log copied into another one: entries with their vectors, batch by batch."""

from __future__ import annotations

from knowgate.history.entries import HistoryStore

BATCH = 500


def copy_history(source: HistoryStore, target: HistoryStore) -> int:
    """How many entries were copied. It may be done twice: an entry that is there is replaced.

    Vectors are worked out again only where the target compares by another embedding.
    """
    count, same = 0, None
    for entries, vectors in source.batches(BATCH):
        same = target.compares_by(source.embedding) if same is None else same
        count += target.add(entries, vectors if same else None)
    return count
