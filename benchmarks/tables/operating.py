"""Tables in the form of the papers: accuracy (retrieval rate) at each gate's own threshold, next to random retrieval.

Gold mastery is not a gate: it knows the gold answers, and retrieves if fewer than half of the samples are right. No gate
that estimates what the LLM knows can save more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.tables.common import Rows, format_decisions, list_gate_names, table
from benchmarks.tables.names import display_name

HALF = 0.5


def operating_tables(evaluations: dict[str, Any]) -> Iterator[str]:
    """Render both tables from the evaluations of the data sets."""
    yield (
        "\n**Accuracy (retrieval rate) at each gate's own threshold, and what retrieving at random as often gives.** "
        "In per cent; the last line has the gold mastery of the samples as the gate.\n"
    )
    yield table(
        ("gate", *evaluations), [*_constant_rows(evaluations), *_gate_rows(evaluations), _gold_row(evaluations)]
    )
    yield "\n**Accuracy of the verdict known / unknown at that threshold**, and of always saying the same.\n"
    yield table(("gate", *evaluations), [*_verdict_rows(evaluations), _majority_row(evaluations)])


def _constant_rows(evaluations: dict[str, Any]) -> Rows:
    return [
        (line, *(_cell(result.gate(line), with_random=False) for result in evaluations.values()))
        for line in ("never", "always", "oracle")
    ]


def _gate_rows(evaluations: dict[str, Any]) -> Rows:
    return [
        (display_name(gate), *(_cell_or_dash(result, gate, _cell) for result in evaluations.values()))
        for gate in list_gate_names(evaluations)
    ]


def _cell_or_dash(evaluation: Any, gate: str, cell: Any) -> str:
    own = next((result for result in evaluation.gates if result.gate == gate), None)
    return "–" if own is None else str(cell(own))


def _cell(gate: Any, *, with_random: bool = True) -> str:
    values = {name: 100 * (gate.measures[name].value or 0.0) for name in ("accuracy", "rate", "random")}
    random_part = f" / {values['random']:.1f}" if with_random else ""
    return f"{values['accuracy']:.1f} ({values['rate']:.0f} %){random_part}"


def _gold_row(evaluations: dict[str, Any]) -> tuple[str, ...]:
    return ("gold mastery", *(gold_cell(result.table) for result in evaluations.values()))


def gold_cell(labels: Any) -> str:
    """Format accuracy and retrieval rate of gold mastery; a dash if there are no samples."""
    masteries = [row.closed.mastery for row in labels.rows]
    if any(mastery is None for mastery in masteries):
        return "–"
    return format_decisions(labels, np.array(masteries, dtype=float) < HALF)


def _verdict_rows(evaluations: dict[str, Any]) -> Rows:
    def verdict_cell(gate: Any) -> str:
        return f"{gate.measures['judged'].value:.3f}"

    return [
        (display_name(gate), *(_cell_or_dash(result, gate, verdict_cell) for result in evaluations.values()))
        for gate in list_gate_names(evaluations)
    ]


def _majority_row(evaluations: dict[str, Any]) -> tuple[str, ...]:
    shares = [float(result.table.closed_book_right.mean()) for result in evaluations.values()]
    return ("majority", *(f"{max(share, 1 - share):.3f}" for share in shares))
