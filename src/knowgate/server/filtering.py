"""Only some documents: passages whose id and title fit the patterns that a request gives.

Any retriever can be asked so: it is asked for more until enough of them fit. Knows nothing of indexes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from knowgate.types import Passage, Retriever

DEEPER = 4  # times as many passages are asked for where too few fit
DEEPEST = 1000


@dataclass(frozen=True)
class Filter:
    """Patterns as of file names (`hr/*`), one of which must fit; none: all do."""

    id: tuple[str, ...] | str = ()
    title: tuple[str, ...] | str = ()

    def fits(self, passage: Passage) -> bool:
        return _fits(passage.id, self.id) and _fits(passage.title, self.title)


def _fits(text: str, patterns: tuple[str, ...] | str) -> bool:
    several = (patterns,) if isinstance(patterns, str) else patterns
    return not several or any(fnmatchcase(text, pattern) for pattern in several)


@dataclass(frozen=True)
class FilteredRetriever:
    """A retriever that finds only what fits."""

    retriever: Retriever
    wanted: Filter

    @property
    def name(self) -> str:
        return f"{self.retriever.name}, filtered"

    @property
    def fingerprint(self) -> str:
        return f"{self.retriever.fingerprint}, filtered"  # nothing that was shown for all documents holds for some

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        depth = DEEPER * k
        while True:
            found = self.retriever.search(queries, depth)
            fitting = [[passage for passage in row if self.wanted.fits(passage)][:k] for row in found]
            if depth >= DEEPEST or all(
                len(kept) == k or len(row) < depth for kept, row in zip(fitting, found, strict=True)
            ):
                return fitting
            depth = min(DEEPER * depth, DEEPEST)
