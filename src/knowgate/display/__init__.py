"""Small things to look at: tables as plain cells, numbers as people read them. No page, no plotting library."""

from __future__ import annotations

from knowgate.display.sheet import NOT_DEFINED, NOTHING, Sheet, markdown_tables, number, percent, points, with_interval

__all__ = ["NOTHING", "NOT_DEFINED", "Sheet", "markdown_tables", "number", "percent", "points", "with_interval"]
