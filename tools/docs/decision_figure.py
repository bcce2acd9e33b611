"""Draw docs/decision.svg, the picture of one decision: `python -m tools.docs.decision_figure`."""

from __future__ import annotations

from pathlib import Path

FIGURE = Path(__file__).resolve().parents[2] / "docs" / "decision.svg"
WIDTH, HEIGHT = 880, 230
BOX_WIDTH, BOX_HEIGHT = 128, 54
# Boxes: name -> (x and y of the center, first line, second line, color class).
BOXES = {
    "question": (70, 115, "Question", "“Who wrote Emma?”", "plain"),
    "rules": (222, 115, "Routing rules", "“Thanks!” skips", "plain"),
    "pass": (374, 115, "One LLM pass", "first words, certainty", "plain"),
    "gate": (526, 115, "Gate", "need 23 %", "gate"),
    "skip": (706, 45, "Skip", "the pass goes on", "skip"),
    "retrieve": (672, 185, "Retrieve", "passages, answer", "search"),
    "arbiter": (820, 185, "Arbiter", "the better answer", "search"),
}
ARROWS = [
    ("question", "rules"),
    ("rules", "pass"),
    ("pass", "gate"),
    ("gate", "skip"),
    ("gate", "retrieve"),
    ("retrieve", "arbiter"),
]
STYLE = (
    "text{fill:#263238;text-anchor:middle}.small{font-size:11px;fill:#546e7a}"
    "rect{fill:#eceff1;stroke:#607d8b;stroke-width:1.5;rx:8}.gate{fill:#e3f2fd;stroke:#0b6bab}"
    ".skip{fill:#e6f4ea;stroke:#1b7f4b}.search{fill:#fff4e0;stroke:#b26a00}path{stroke:#607d8b;stroke-width:1.5;fill:none}"
    "@media(prefers-color-scheme:dark){text{fill:#eceff1}.small{fill:#b0bec5}rect{fill:#263238}.gate{fill:#12344d}"
    ".skip{fill:#12382a}.search{fill:#40300f}}"
)


def draw_box(name: str) -> str:
    """Draw one box with its two lines of text."""
    x, y, title, detail, kind = BOXES[name]
    left, top = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
    return (
        f'<rect class="{kind}" x="{left:g}" y="{top:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}"/>'
        f'<text x="{x}" y="{y - 4}">{title}</text><text class="small" x="{x}" y="{y + 14}">{detail}</text>'
    )


def draw_arrow(start: str, end: str) -> str:
    """Draw an arrow from the right side of one box to the left side of another."""
    x1, y1, x2, y2 = BOXES[start][0] + BOX_WIDTH / 2, BOXES[start][1], BOXES[end][0] - BOX_WIDTH / 2, BOXES[end][1]
    return f'<path d="M{x1:g} {y1} L{x2 - 6:g} {y2}" marker-end="url(#tip)"/>'


def draw() -> str:
    """Return the whole figure as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 10} {HEIGHT}" role="img" aria-labelledby="t" '
        'font-family="system-ui, sans-serif" font-size="14">',
        '<title id="t">Question, rules, one LLM pass, gate: below the threshold skip, above it retrieve.</title>',
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" style="fill:#607d8b;stroke:none"/></marker></defs>',
        *(draw_arrow(*arrow) for arrow in ARROWS),
        *(draw_box(name) for name in BOXES),
        '<text class="small" x="548" y="66">below the threshold</text><text class="small" x="572" y="178">above</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    FIGURE.write_text(draw(), encoding="utf-8")
