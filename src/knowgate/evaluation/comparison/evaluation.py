"""An evaluation: gates measured on the same questions, compared in pairs, sliced, and as plain data for files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from knowgate.errors import BadInput, UnknownName
from knowgate.evaluation.actions import ActionLine
from knowgate.evaluation.cascade import Cascade, CascadeLine
from knowgate.evaluation.comparison.gate_results import (
    GateResult,
    as_baseline,
    baselines,
    majority_share,
    measure_gates,
    slice_rows,
)
from knowgate.evaluation.comparison.overview import main_sheet, short_sheet, trade_off_svg
from knowgate.evaluation.comparison.promised import Promised
from knowgate.evaluation.second_look import SecondLine
from knowgate.gates import GateScores
from knowgate.markup import escape
from knowgate.runs import DIMENSIONS, FREQUENCY, THIRDS, Trial
from knowgate.statistics import RESAMPLES, Bools, Comparison, Draws, estimate, holm, mcnemar, p_value


@dataclass(frozen=True)
class SliceTable:
    """Gates on part of the questions; empty parts are named, with n = 0."""

    dimension: str
    value: str
    n: int
    never: float | None
    always: float | None
    rows: list[tuple[str, float, float, float]]


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Gates in the order given, between never and oracle."""

    trial: Trial
    gates: list[GateResult]
    comparisons: list[Comparison]
    slices: list[SliceTable]
    resamples: int
    second: list[SecondLine] = field(default_factory=list)
    promises: dict[str, Promised] = field(default_factory=dict)  # guarantees of the gates that have one
    cascade: Cascade | None = None
    actions: list[ActionLine] = field(default_factory=list)

    def gate(self, name: str) -> GateResult:
        """What one gate came to, by its name in the tables."""
        by_name = {one.gate: one for one in self.gates}
        if name not in by_name:
            raise UnknownName("gate of this evaluation", name, by_name)
        return by_name[name]

    def __repr__(self) -> str:
        return f"<Evaluation on {self._about}>\n{short_sheet(self.gates).text()}"

    def _repr_html_(self) -> str:
        """For notebooks: the main table and the curves."""
        if self.trial.open_right is None:
            return short_sheet(self.gates).html()
        about = f"<p>Evaluation on {escape(self._about)}</p>"
        return f"{about}{main_sheet(self.gates).html()}{trade_off_svg(self.gates)}"

    @property
    def _about(self) -> str:
        runs = ", ".join(Path(run).name for run in self.trial.runs)
        return f"{len(self.trial.rows)} questions of {self.trial.settings['model']} ({runs})"


def compare(trial: Trial, scored: Sequence[GateScores], *, resamples: int = RESAMPLES, seed: int = 0) -> Evaluation:
    """Measure the gates; never and always are added, and the oracle where there are open-book answers."""
    if trial.open_right is None and (trial.closed_right.all() or not trial.closed_right.any()):
        kind = "right" if trial.closed_right.all() else "wrong"
        raise BadInput(
            f"every closed-book answer is {kind} and there are no open-book answers: nothing can be told apart. "
            "Evaluate other questions, or label them with passages."
        )
    draws = Draws(len(trial.rows), resamples, seed)
    beside = baselines(trial)
    asked = [one for one in scored if one.name not in {line.name for line in beside}]
    results = measure_gates(trial, [*asked, *beside], draws)
    gates, drawn_lines = results[: len(asked)], [as_baseline(trial, one) for one in results[len(asked) :]]
    if not drawn_lines:
        return Evaluation(trial, gates, [], _slices(trial, gates), resamples)
    never, always, oracle = drawn_lines
    compared = _compare(gates, always)
    every = [never, always, *gates, oracle]
    return Evaluation(trial, every, compared, _slices(trial, every), resamples)


def _compare(gates: Sequence[GateResult], always: GateResult) -> list[Comparison]:
    """Each gate against always retrieving, and against the best of the others by accuracy."""
    if not gates:
        return []
    best = max(gates, key=lambda one: one.measures["accuracy"].value or 0.0)
    pairs = [(gate, always) for gate in gates] + [(best, gate) for gate in gates if gate is not best]
    compared = [_pair(first, second) for first, second in pairs]
    corrected = holm([one.p_mcnemar for one in compared])
    return [replace(one, p_holm=p) for one, p in zip(compared, corrected, strict=True)]


def _pair(first: GateResult, second: GateResult) -> Comparison:
    differences = first.drawn["accuracy"] - second.drawn["accuracy"]
    gap = estimate(differences)
    p, only_first, only_second = mcnemar(first.right, second.right)
    return Comparison(
        first.gate, second.gate, gap.value or 0.0, gap.low or 0.0, gap.high or 0.0, p_value(differences), p,
        only_first, only_second,
    )  # fmt: skip


def _slices(trial: Trial, gates: Sequence[GateResult]) -> list[SliceTable]:
    tables = []
    for dimension in DIMENSIONS:
        values = trial.part_of(dimension)
        kinds = sorted({value for value in values if value is not None})
        kinds = list(THIRDS) if dimension == FREQUENCY and kinds else kinds
        if len(kinds) < 2:
            continue
        tables += [_slice(trial, gates, dimension, kind, values == kind) for kind in kinds]
    return tables


def _slice(trial: Trial, gates: Sequence[GateResult], dimension: str, value: str, inside: Bools) -> SliceTable:
    n = int(inside.sum())
    never = float(trial.closed_right[inside].mean()) if n else None
    always = float(trial.open_right[inside].mean()) if n and trial.open_right is not None else None
    return SliceTable(dimension, value, n, never, always, slice_rows(trial, gates, inside))


def evaluation_json(evaluation: Evaluation) -> dict[str, Any]:
    """Every number of the report, without the rows."""
    trial = evaluation.trial
    return {
        "model": trial.settings["model"],
        "runs": trial.runs,
        "questions": len(trial.rows),
        "synthetic": int(trial.synthetic.sum()),
        "left_out": trial.left_out,
        "answered closed-book for want of passages": trial.unopened,
        "grader": trial.settings["grader"],
        "resamples": evaluation.resamples,
        "majority": majority_share(trial),
        "gates": [_gate_json(gate) for gate in evaluation.gates],
        "comparisons": [asdict(one) for one in evaluation.comparisons],
        "slices": [asdict(one) for one in evaluation.slices],
        **({"second_look": [asdict(one) for one in evaluation.second]} if evaluation.second else {}),
        **({"actions": [asdict(one) for one in evaluation.actions]} if evaluation.actions else {}),
        **({"cascade": _cascade_json(evaluation.cascade)} if evaluation.cascade else {}),
    }


def _cascade_json(cascade: Cascade) -> dict[str, Any]:
    lines = [_cascade_line(line) for line in cascade.lines]
    return {**asdict(cascade), "lines": lines}


def _cascade_line(line: CascadeLine) -> dict[str, Any]:
    shown = {**asdict(line), "at_rate": {f"{rate:.2f}": value for rate, value in line.at_rate.items()}}
    return {name: value for name, value in shown.items() if name != "right"}


def _gate_json(gate: GateResult) -> dict[str, Any]:
    curve = gate.frontier
    return {
        "gate": gate.gate,
        "threshold": gate.threshold,
        "note": gate.note,
        "far": gate.far,
        **{name: asdict(value) for name, value in gate.measures.items()},
        "cost": asdict(gate.cost),
        "accuracy_at_rate": {f"{rate:.2f}": value for rate, value in gate.at_rate.items()},
        "area": curve.area if curve else None,
        "random_area": curve.random_area if curve else None,
        "tuned": asdict(gate.tuned) if gate.tuned else None,
    }
