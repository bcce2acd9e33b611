"""The page "How much would I save?": recorded curves of five LLMs as a table, and a calculator on top of them.

`python -m tools.docs.savings` writes the table into docs/savings.md. The hook of mkdocs adds the calculator, which is
plain HTML and JavaScript.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.policy_evaluation import compare
from benchmarks.policy_predictions import fit_calibration, list_trained_sets, load_predictions, make_gates
from benchmarks.policy_sets import RECORDED_SETS
from knowgate.core.display import format_percent
from knowgate.evaluation.cost import DEFAULT_SEARCH_PRICE, DEFAULT_SEARCH_SECONDS
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.proportions import format_points_estimate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "savings.md"
GATE = "judge, mean gain"  # one gate for all LLMs, so that none is picked by its results
RATES = tuple(step / 10 for step in range(11))  # shares of the questions that are searched for
TABLE_RATES = (0.8, 0.5, 0.2)
TABLE_PATTERN = re.compile(r"(<!-- curves -->\n).*?(<!-- /curves -->)", re.DOTALL)
DATA_SETS = {"llama3_8b": "six data sets", "gpt3_realtimeqa": "news"}
ASSET = Path(__file__).with_name("savings.html")


@dataclass(frozen=True)
class CurvePoint:
    """Right answers of an LLM if a share of the questions is searched for; the difference is against always."""

    searched: float
    right: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class RecordedCurve:
    """Right answers of one LLM at each share of searches, on its test questions."""

    llm: str
    n: int
    points: tuple[CurvePoint, ...]

    @property
    def never(self) -> float:
        """Share of right answers without any search."""
        return self.points[0].right

    @property
    def always(self) -> float:
        """Share of right answers with a search for every question."""
        return self.points[-1].right


@cache
def measure_curves() -> tuple[RecordedCurve, ...]:
    """Measure the curves from the recorded predictions, sorted by what the LLMs know."""
    curves = [_measure_curve(name) for name in list_trained_sets()]
    return tuple(sorted(curves, key=lambda curve: curve.never))


def _measure_curve(name: str) -> RecordedCurve:
    test = load_predictions(name).test
    needs = {gate.name: gate.needs for gate in make_gates(test, fit_calibration(name))}[GATE]
    by_need = np.argsort(-needs, kind="stable")  # questions of highest need are searched for first
    points = []
    for rate in RATES:
        retrieved = np.zeros(len(needs), dtype=bool)
        retrieved[by_need[: round(rate * len(needs))]] = True
        right = np.where(retrieved, test.open, test.closed)
        change = compare(right, test.open)
        points.append(CurvePoint(rate, round(float(right.mean()), 5), change["value"], change["low"], change["high"]))
    llm = f"{RECORDED_SETS[name].llm}, {DATA_SETS.get(name, 'NQ')}"
    return RecordedCurve(llm, len(needs), tuple(points))


def build_table() -> str:
    """Build the table of the page: the change of right answers at some shares of searches."""
    rates = " | ".join(f"{100 * rate:.0f} % searched" for rate in TABLE_RATES)
    lines = [f"| LLM | right from memory | right with a search | {rates} |", f"|{'---|' * (3 + len(TABLE_RATES))}"]
    for curve in measure_curves():
        cells = [_format_change(point) for rate in TABLE_RATES for point in curve.points if point.searched == rate]
        lines.append(
            f"| {curve.llm} | {format_percent(curve.never)} | {format_percent(curve.always)} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def _format_change(point: CurvePoint) -> str:
    return format_points_estimate(Estimate(point.difference, point.low, point.high))


def insert_table(page: str) -> str:
    """Return a page with the current table between its marks."""
    return TABLE_PATTERN.sub(lambda match: match[1] + build_table() + match[2], page)


def markdown() -> str:
    """Return the calculator as HTML, which Markdown passes through."""
    curves = [{**asdict(curve), "never": curve.never} for curve in measure_curves()]
    page = ASSET.read_text(encoding="utf-8")
    values = {
        "CURVES": json.dumps(curves),
        "SEARCH_PRICE": DEFAULT_SEARCH_PRICE,
        "SEARCH_SECONDS": DEFAULT_SEARCH_SECONDS,
    }
    for name, value in values.items():
        page = page.replace(f"@{name}@", str(value))
    return page.strip()


if __name__ == "__main__":
    PAGE.write_text(insert_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
