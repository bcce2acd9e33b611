"""The papers' own main form: accuracy (retrieval rate) at each gate's own threshold, beside matched random.

Gold mastery is no gate: it is told from gold answers how many of the samples were right (mastery), and retrieves where
fewer than half were. What it cannot save, no gate that reads the LLM's knowledge can.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.tables.common import Rows, decided, gate_names, table
from benchmarks.tables.names import shown

HALF = 0.5


def operating_tables(found: dict[str, Any]) -> Iterator[str]:
    """found: data set -> evaluation."""
    yield (
        "\n**Accuracy (retrieval rate) at each gate's own threshold, and what retrieving at random as often gives.** "
        "In per cent; the last line has the gold mastery of the samples as the gate.\n"
    )
    yield table(("gate", *found), [*_lines(found), *_gates(found), _gold(found)])
    yield "\n**Accuracy of the verdict known / unknown at that threshold**, and of always saying the same.\n"
    yield table(("gate", *found), [*_verdicts(found), _majority(found)])


def _lines(found: dict[str, Any]) -> Rows:
    return [
        (line, *(_cell(one.gate(line), with_random=False) for one in found.values()))
        for line in ("never", "always", "oracle")
    ]


def _gates(found: dict[str, Any]) -> Rows:
    return [(shown(gate), *(_or_dash(one, gate, _cell) for one in found.values())) for gate in gate_names(found)]


def _or_dash(evaluation: Any, gate: str, cell: Any) -> str:
    own = next((one for one in evaluation.gates if one.gate == gate), None)
    return "–" if own is None else str(cell(own))


def _cell(gate: Any, *, with_random: bool = True) -> str:
    values = {name: 100 * (gate.measures[name].value or 0.0) for name in ("accuracy", "rate", "random")}
    beside = f" / {values['random']:.1f}" if with_random else ""
    return f"{values['accuracy']:.1f} ({values['rate']:.0f} %){beside}"


def _gold(found: dict[str, Any]) -> tuple[str, ...]:
    return ("gold mastery", *(gold_cell(one.table) for one in found.values()))


def gold_cell(trial: Any) -> str:
    mastered = [row.closed.mastery for row in trial.rows]
    if any(one is None for one in mastered):
        return "–"
    return decided(trial, np.array(mastered, dtype=float) < HALF)


def _verdicts(found: dict[str, Any]) -> Rows:
    def judged(gate: Any) -> str:
        return f"{gate.measures['judged'].value:.3f}"

    return [(shown(gate), *(_or_dash(one, gate, judged) for one in found.values())) for gate in gate_names(found)]


def _majority(found: dict[str, Any]) -> tuple[str, ...]:
    shares = [float(one.table.closed_right.mean()) for one in found.values()]
    return ("majority", *(f"{max(share, 1 - share):.3f}" for share in shares))
