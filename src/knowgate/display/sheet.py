"""A table as plain cells, and how numbers look in one. Knows nothing of what the cells mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.statistics import Share

NOT_DEFINED = "not defined"
NOTHING = "–"


@dataclass(frozen=True)
class Sheet:
    """A table. A row shorter than the columns is a remark that fills the rest of the line."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f} %"


def points(value: float) -> str:
    """A difference of two shares, in percentage points; what rounds to nothing has no sign."""
    rounded = round(100 * value, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"


def number(value: float | None, missing: str = NOTHING) -> str:
    return missing if value is None else f"{round(value, 2) or 0.0:.2f}"  # no negative zero


def with_interval(found: Share, missing: str = NOTHING) -> str:
    if found.value is None or found.low is None or found.high is None:
        return missing
    return f"{percent(found.value)} [{100 * found.low:.1f}, {100 * found.high:.1f}], n = {found.n}"


def markdown_tables(sheets: Sequence[Sheet]) -> str:
    """Tables for a Markdown file."""
    parts = []
    for sheet in sheets:
        lines = [sheet.columns, ("---",) * len(sheet.columns), *sheet.rows]
        table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        parts.append(f"### {sheet.title}\n\n{table}\n")
    return "\n".join(parts)
