"""The few numbers on an 8B LLM behind an API that `knowgate demo` shows, from the predictions on record.

The package ships them as `demo_data/judge.json`; `make results` writes that file anew, and a test compares.
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
    """never, always, weighed (always, then the arbiter) and oracle: shares of right answers.

    points: the cascade, from few searches to many.
    """
    answers = judge.test.answers
    return {
        "predictions": judge.name,
        "questions": len(answers),
        "never": _share(answers.closed),
        "always": _share(answers.open),
        "weighed": _share(judge.test.given),
        "oracle": _share(answers.closed | answers.open),
        "points": [_point(one) for one in reversed(cascade_points(judge, "judge"))],
    }


def write_summary(judge: Judge, path: Path) -> None:
    write_json(path, summary(judge))


def _share(right: BoolArray) -> float:
    return round(float(right.mean()), DIGITS)


def _point(point: Point) -> dict[str, float]:
    """searched: the share that came out on test rows. gain, low, high: against always, with its 95 % interval."""
    gap, right = point.against_always, point.accuracy.value
    values = {"searched": point.rate, "right": right, "gain": gap.value, "low": gap.low, "high": gap.high}
    return {name: round(value or 0.0, DIGITS) for name, value in values.items()}
