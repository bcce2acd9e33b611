"""Markdown tables from rows of text."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A column that is empty in every row is left out."""
    kept = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell(line[place]) for place in kept)} |" for line in lines)


def cell(text: str) -> str:
    """Text that stays within its column and, outside of code, is not taken for HTML."""
    pieces = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(piece if place % 2 else piece.replace("<", "&lt;") for place, piece in enumerate(pieces))


def code(text: str) -> str:
    return f"`{text}`" if text else ""
