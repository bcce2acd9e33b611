"""Summarize the results for an 8B LLM behind an API, as `knowgate demo` shows them, from recorded predictions.

The package ships the summary as `cli/demo/data/judge.json`. `make results` writes that file; a test compares it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.judge_answers import Judge
from benchmarks.judge_cascade import Point, cascade_points
from knowgate.core.files import write_json
from knowgate.stats.metrics import BoolArray

DIGITS = 4


def summary(judge: Judge) -> dict[str, Any]:
    """Return the content of `judge.json`.

    "never", "always", "weighed" (always retrieve, then the arbiter) and "oracle" are shares of right answers. "points" has
    the cascade at several retrieval rates, lowest rate first.
    """
    answers = judge.test.answers
    return {
        "predictions": judge.name,
        "questions": len(answers),
        "never": _share(answers.closed),
        "always": _share(answers.open),
        "weighed": _share(judge.test.arbiter_right),
        "oracle": _share(answers.closed | answers.open),
        "points": [_summarize_point(point) for point in reversed(cascade_points(judge, "judge"))],
    }


def write_summary(judge: Judge, path: Path) -> None:
    """Write the summary as JSON."""
    write_json(path, summary(judge))


def _share(right: BoolArray) -> float:
    return round(float(right.mean()), DIGITS)


def _summarize_point(point: Point) -> dict[str, float]:
    """Return the numbers of one point.

    "searched" is the retrieval rate on test rows. "gain", "low" and "high" compare the accuracy with always retrieving,
    with a 95 % interval.
    """
    gap, right = point.against_always, point.accuracy.value
    values = {"searched": point.rate, "right": right, "gain": gap.value, "low": gap.low, "high": gap.high}
    return {name: round(value or 0.0, DIGITS) for name, value in values.items()}
