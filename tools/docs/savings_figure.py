"""Draw docs/savings.svg, what skipped searches cost five LLMs: `python -m tools.docs.savings_figure`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.docs.savings import RecordedCurve, measure_curves

FIGURE = Path(__file__).resolve().parents[2] / "docs" / "savings.svg"
WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 574, 14, 246  # the plot area
HIGHEST, LOWEST = 3, -16  # points against always searching
LABEL_HEIGHT = 17
COLORS = ("#cc79a7", "#d55e00", "#e69f00", "#56b4e9", "#0072b2")
STYLE = (
    "text{fill:#37474f}.grid{stroke:#cfd8dc}.zero{stroke:#607d8b;stroke-width:1.5}"
    "polyline{fill:none;stroke-width:2.5}.random{stroke-dasharray:2 4;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){text{fill:#cfd8dc}.grid{stroke:#455a64}}"
)


def _x(saved: float) -> float:
    return LEFT + (RIGHT - LEFT) * saved


def _y(points: float) -> float:
    return TOP + (BOTTOM - TOP) * (HIGHEST - points) / (HIGHEST - LOWEST)


def place_labels(heights: Sequence[float]) -> list[float]:
    """Return heights for labels, in the same order, so that no two labels overlap."""
    placed = dict.fromkeys(range(len(heights)), 0.0)
    next_free = 0.0
    for number in sorted(placed, key=lambda index: heights[index]):
        placed[number] = max(heights[number], next_free)
        next_free = placed[number] + LABEL_HEIGHT
    return list(placed.values())


def draw_curve(curve: RecordedCurve, color: str, label_y: float) -> list[str]:
    """Draw a curve, its name, and the line for skipping at random."""
    points = " ".join(f"{_x(1 - point.searched):.1f},{_y(100 * point.difference):.1f}" for point in curve.points)
    end = _y(100 * (curve.never - curve.always))
    return [
        f'<line class="random" stroke="{color}" x1="{LEFT}" y1="{_y(0):.1f}" x2="{RIGHT}" y2="{end:.1f}"/>',
        f'<polyline stroke="{color}" points="{points}"/>',
        f'<rect x="{RIGHT + 8}" y="{label_y - 9:.1f}" width="10" height="10" rx="2" fill="{color}"/>',
        f'<text x="{RIGHT + 23}" y="{label_y:.1f}">{curve.llm.partition(",")[0]}</text>',
    ]


def draw_axes() -> list[str]:
    """Draw grid lines, numbers and titles of both axes."""
    parts = []
    for points in range(-15, HIGHEST + 1, 5):
        kind = "zero" if points == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" y1="{_y(points):.1f}" x2="{RIGHT}" y2="{_y(points):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{_y(points) + 4:.1f}" text-anchor="end">{points}</text>')
    for percent in range(0, 101, 20):
        parts.append(f'<text x="{_x(percent / 100):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{percent} %</text>')
    middle = (TOP + BOTTOM) / 2
    return [
        *parts,
        f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 42}" text-anchor="middle">searches saved</text>',
        f'<text transform="translate(14 {middle:g}) rotate(-90)" text-anchor="middle">right answers, points</text>',
    ]


def draw() -> str:
    """Return the whole figure as SVG."""
    curves = measure_curves()
    heights = place_labels([_y(100 * (curve.never - curve.always)) + 4 for curve in curves])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t" '
        'font-family="system-ui, sans-serif" font-size="14">',
        '<title id="t">Change of right answers against always searching, by the share of searches that are saved, for '
        "five LLMs; dotted lines skip at random.</title>",
        f"<style>{STYLE}</style>",
        *draw_axes(),
        *(
            part
            for curve, color, y in zip(curves, COLORS, heights, strict=True)
            for part in draw_curve(curve, color, y)
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    FIGURE.write_text(draw(), encoding="utf-8")
