"""Values as PostgreSQL takes them."""

from __future__ import annotations

from collections.abc import Iterable

NUL, INSTEAD = "\0", "\N{REPLACEMENT CHARACTER}"


def storable(text: str) -> str:
    """A text that a column can hold: PostgreSQL knows neither NUL nor half characters."""
    return text.replace(NUL, INSTEAD).encode("utf-8", "replace").decode("utf-8")


def as_vector(numbers: Iterable[float]) -> str:
    """A vector as pgvector reads it; nine digits bring every 32-bit number back."""
    return "[" + ",".join(f"{number:.9g}" for number in numbers) + "]"
