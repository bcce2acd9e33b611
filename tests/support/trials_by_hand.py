"""Label runs for evaluations: needs on record, sides graded by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from knowgate.data.runs.records import RecordedNeeds, write_needs
from knowgate.data.runs.rows import LabelRow
from tests.support.runs_by_hand import row, side, varied_rows, write_run

SETTINGS = {"model_fingerprint": "m", "prompts_fingerprint": "p", "grader": "contains"}


def four_rows() -> list[LabelRow]:
    """(closed, open): kept, helped, hurt, hopeless."""
    outcomes = [(True, True), (False, True), (True, False), (False, False)]
    return [row(f"q{i}", side(closed), side(opened)) for i, (closed, opened) in enumerate(outcomes)]


def trial_run(path: Path, rows: list[LabelRow] | None = None, **settings: Any) -> Path:
    """A run whose gate 'good' needs most where the closed-book answer is wrong."""
    chosen = four_rows() if rows is None else rows
    run = write_run(path, chosen, **{**SETTINGS, **settings})
    graded = [item for item in chosen if item.closed is not None and item.error is None]
    good = {item.id: 0.2 if item.closed and item.closed.correct else 0.8 for item in graded}
    poor = {item.id: 0.7 for item in graded}
    write_needs(run, [RecordedNeeds("good", 0.5, good, seconds=0.01), RecordedNeeds("poor", 0.5, poor)])
    return run


def varied_run(path: Path, n: int = 60) -> Path:
    return trial_run(path, varied_rows(n))
