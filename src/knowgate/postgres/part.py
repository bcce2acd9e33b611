"""What a part of a schema is: tables that belong together, and the way they grew. Knows no psycopg."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Tables that belong together. steps: statements that lead to version 1, 2, ... tables: columns as they are then.

    has_vectors: pgvector is needed.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    tables: Mapping[str, frozenset[str]]
    has_vectors: bool = False

    @property
    def version(self) -> int:
        return len(self.steps)
