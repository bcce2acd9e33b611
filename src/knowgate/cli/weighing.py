"""The bar of an arbiter that weighs the answers of label runs: a judge takes its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from knowgate.cli.console import WORDS
from knowgate.cli.progress import progress


@contextmanager
def weighing_bar(arbiter: str | None) -> Iterator[Callable[[int, int], None]]:
    """What an arbiter tells how far it is; without one there is nothing to see."""
    if arbiter is None:
        yield lambda done, total: None
        return
    with progress("weighing answers", "questions", WORDS) as show:
        yield lambda done, total: show(done, total)
