"""Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table without the columns that are empty in every row."""
    columns = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell(line[column]) for column in columns)} |" for line in lines)


def cell(text: str) -> str:
    """Escape what would end the cell or be read as HTML; code in backticks stays as it is."""
    pieces = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(piece if number % 2 else piece.replace("<", "&lt;") for number, piece in enumerate(pieces))


def code(text: str) -> str:
    """Wrap a text in backticks; an empty text stays empty."""
    return f"`{text}`" if text else ""
