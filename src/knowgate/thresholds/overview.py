"""A threshold at a glance: what it does on the questions it was chosen on and on those held out."""

from __future__ import annotations

from collections.abc import Callable

from knowgate.display import Sheet
from knowgate.gates import ALWAYS
from knowgate.statistics import wilson
from knowgate.thresholds.outcomes import ThresholdResult


def calibration_sheet(threshold: float, chosen: ThresholdResult, held: ThresholdResult | None) -> Sheet:
    """Shares with their 95 % intervals (Wilson)."""
    columns = [chosen, *([held] if held else [])]
    shown = "always retrieve" if threshold == ALWAYS else f"{threshold:g}"
    rows = [("threshold", *(shown for _ in columns))]
    cells = {**CELLS, **(HARMED if chosen.right_chosen is None else HARMED_OR_GAINED)}
    rows += [(title, *(cell(one) for one in columns)) for title, cell in cells.items()]
    return Sheet("Threshold", ("", "chosen on", "held out")[: len(columns) + 1], tuple(rows))


def _share(hits: int, n: int) -> str:
    low, high = wilson(hits, n)
    return f"{hits / n:.1%} [{low:.1%}, {high:.1%}]"


CELLS: dict[str, Callable[[ThresholdResult], str]] = {
    "questions": lambda one: str(one.n),
    "retrieval rate": lambda one: _share(one.retrieved, one.n),
    "accuracy": lambda one: _share(one.right, one.n),
    "accuracy, always": lambda one: _share(one.right_always, one.n),
    "accuracy, never": lambda one: _share(one.right_never, one.n),
    "lost against always": lambda one: f"{one.loss:+.1%}",
}
HARMED: dict[str, Callable[[ThresholdResult], str]] = {
    "harmed skips": lambda one: f"{one.harmed}: {_share(one.harmed, one.n)}",
}
HARMED_OR_GAINED: dict[str, Callable[[ThresholdResult], str]] = {
    "accuracy, always and then the arbiter": lambda one: _share(one.right_chosen or 0, one.n),
    "harmed": HARMED["harmed skips"],
    "gained": lambda one: f"{one.gained}: {_share(one.gained, one.n)}",
}
