"""Draw docs/decision.svg, the picture of one decision: `python -m tools.docs.decision_figure`."""

from __future__ import annotations

from pathlib import Path

FIGURE = Path(__file__).resolve().parents[2] / "docs" / "decision.svg"
WIDTH, HEIGHT = 900, 152
BOX_WIDTH, BOX_HEIGHT = 128, 52
# Boxes: name -> (x and y of the center, first line, second line, color class).
BOXES = {
    "question": (68, 118, "Question", "Who wrote Emma?", "plain"),
    "draft": (221, 118, "LLM call 1", "begins an answer", "plain"),
    "gate": (374, 118, "Gate", "need 23 %", "gate"),
    "skip": (527, 34, "Skip", "call 1 goes on", "skip"),
    "retrieve": (527, 118, "Retrieve", "one search", "search"),
    "answer": (680, 118, "LLM call 2", "reads passages", "search"),
    "arbiter": (832, 118, "Arbiter", "picks an answer", "search"),
    "rules": (221, 34, "Routing rule", "“Thanks!” skips", "plain"),
}
# Arrows: start and end of each line, from a side of one box to a side of another.
ARROWS = [
    ("question", "right", "draft", "left"),
    ("question", "top", "rules", "left"),
    ("rules", "right", "skip", "left"),
    ("draft", "right", "gate", "left"),
    ("gate", "top", "skip", "left"),
    ("gate", "right", "retrieve", "left"),
    ("retrieve", "right", "answer", "left"),
    ("answer", "right", "arbiter", "left"),
]
CAPTIONS = [
    "Need: how likely the LLM is to be",
    "wrong without a search. Above the",
    "threshold, the gate retrieves.",
]
STYLE = (
    "text{fill:#263238;text-anchor:middle}.small{font-size:12.5px;fill:#455a64}.left{text-anchor:start}"
    "rect{fill:#eceff1;stroke:#607d8b;stroke-width:1.5;rx:8}.gate{fill:#e3f2fd;stroke:#0b6bab}"
    ".skip{fill:#e6f4ea;stroke:#1b7f4b}.search{fill:#fff4e0;stroke:#b26a00}path{stroke:#607d8b;stroke-width:1.5;fill:none}"
    "@media(prefers-color-scheme:dark){text{fill:#eceff1}.small{fill:#b0bec5}rect{fill:#263238}.gate{fill:#12344d}"
    ".skip{fill:#12382a}.search{fill:#40300f}}"
)
SIDES = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1)}


def draw_box(name: str) -> str:
    """Draw one box with its two lines of text."""
    x, y, title, detail, kind = BOXES[name]
    left, top = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
    return (
        f'<rect class="{kind}" x="{left:g}" y="{top:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}"/>'
        f'<text x="{x}" y="{y - 4}">{title}</text><text class="small" x="{x}" y="{y + 15}">{detail}</text>'
    )


def draw_arrow(start: str, start_side: str, end: str, end_side: str) -> str:
    """Draw an arrow from a side of one box to a side of another."""
    (x1, y1), (x2, y2) = _find_side(start, start_side, 0), _find_side(end, end_side, 4)
    return f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" marker-end="url(#tip)"/>'


def _find_side(name: str, side: str, gap: int) -> tuple[float, float]:
    """Return the middle of a side of a box, moved outwards by a gap."""
    x, y = BOXES[name][:2]
    across, down = SIDES[side]
    return x + across * (BOX_WIDTH / 2 + gap), y + down * (BOX_HEIGHT / 2 + gap)


def draw() -> str:
    """Return the whole figure as SVG."""
    captions = [
        f'<text class="small left" x="616" y="{20 + 19 * number}">{caption}</text>'
        for number, caption in enumerate(CAPTIONS)
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t" '
        'font-family="system-ui, sans-serif" font-size="15">',
        '<title id="t">Question, rules, first LLM call, gate: below the threshold skip, above it retrieve, call the LLM '
        "again and pick the better answer.</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" style="fill:#607d8b;stroke:none"/></marker></defs>',
        *(draw_arrow(*arrow) for arrow in ARROWS),
        *(draw_box(name) for name in BOXES),
        *captions,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    FIGURE.write_text(draw(), encoding="utf-8")
