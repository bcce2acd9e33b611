"""Small things to look at: tables as plain cells, numbers as people read them, curves. No page, no plotting library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.display.chart import (
        COLOURS,
        GREY,
        Axis,
        Curve,
        Frame,
        Point,
        as_image,
        fitting_axis,
        line_chart,
    )
    from knowgate.display.controls import (
        harmless,
        harmless_json,
        markdown_code,
        markdown_text,
        one_harmless_line,
    )
    from knowgate.display.sheet import (
        NOT_DEFINED,
        NOTHING,
        Sheet,
        markdown_tables,
        number,
        percent,
        points,
        points_with_interval,
        share_with_interval,
        with_interval,
    )
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "Axis",
    "COLOURS",
    "Curve",
    "Frame",
    "GREY",
    "NOTHING",
    "NOT_DEFINED",
    "Point",
    "Sheet",
    "as_image",
    "fitting_axis",
    "harmless",
    "harmless_json",
    "line_chart",
    "markdown_code",
    "markdown_tables",
    "markdown_text",
    "number",
    "one_harmless_line",
    "percent",
    "points",
    "points_with_interval",
    "share_with_interval",
    "with_interval",
]
