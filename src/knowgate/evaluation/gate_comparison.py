"""An evaluation: gates measured on the same questions, compared in pairs, sliced, and as plain data for files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from knowgate.core.chart import COLORS, GRAY, Axis, ChartFrame, ChartPoint, Curve, fit_axis, render_line_chart
from knowgate.core.display import MISSING_VALUE, TextTable, format_percent
from knowgate.core.validation import read_text
from knowgate.data.runs.rows import ANSWER_FREQUENCY, FREQUENCY_THIRDS, SLICE_DIMENSIONS
from knowgate.data.runs.table import LabelTable
from knowgate.errors import BadInput, UnknownName
from knowgate.evaluation.gate_results import (
    GateResult,
    build_baselines,
    compute_majority_share,
    make_baseline_result,
    measure_gates,
    measure_slice,
)
from knowgate.evaluation.post_retrieval import Cascade, CascadeResult, SecondLookResult
from knowgate.evaluation.retrieval_actions import ActionResult
from knowgate.gates import load_gate
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.calibration.deployment import (
    Deployment,
    describe_guarantee,
    find_violated_conditions,
    has_guarantee_without_arbiter,
)
from knowgate.gates.calibration.evidence import CALIBRATION_KEYS_FILE
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.offline_scoring import TableScores, get_gate_folder, get_gate_name
from knowgate.labels.options import count_shown_passages
from knowgate.stats.bootstrap import DEFAULT_RESAMPLES, Bootstrap, bootstrap_p_value, summarize_resamples
from knowgate.stats.formats import format_percent_estimate, format_points_estimate
from knowgate.stats.metrics import BoolArray
from knowgate.stats.proportions import PairedComparison, holm_correction, mcnemar_test
from knowgate.types import Gate
from knowgate.types.markup import escape_html

CURVE_STEPS = 60  # points of a curve
MAX_CURVES = len(COLORS)  # gates with a curve of their own


def build_answer_table(gates: Sequence[GateResult]) -> TextTable:
    """What the decisions of each gate come to; needs open-book answers."""
    columns = ("gate", "accuracy", "retrieval", "matched random", "gain", "loss", "harm", "waste", "headroom")
    return TextTable("Answers", columns, tuple(_main_row(gate) for gate in gates))


def _main_row(gate: GateResult) -> tuple[str, ...]:
    m = gate.measures
    return (
        gate.gate,
        format_percent_estimate(m["accuracy"]),
        format_percent(m["rate"].value),
        format_percent(m["random"].value),
        format_points_estimate(m["gain"]),
        format_points_estimate(m["loss"]),
        format_percent(m["harm"].value),
        format_percent(m["waste"].value),
        format_percent(m["recovered"].value),
    )


def build_short_table(gates: Sequence[GateResult]) -> TextTable:
    """A few columns that fit any width: of the answers where there are both kinds, and of the ranking."""
    has_open = any("accuracy" in gate.measures for gate in gates)
    columns = ("gate", *(("accuracy", "retrieval", "gain") if has_open else ()), "AUROC")
    return TextTable("Gates compared", columns, tuple(_short_row(gate, has_open=has_open) for gate in gates))


def _short_row(gate: GateResult, *, has_open: bool) -> tuple[str, ...]:
    m = gate.measures
    auroc = m["auroc"].shown() if "auroc" in m and m["auroc"].value is not None else MISSING_VALUE
    if not has_open:
        return (gate.gate, auroc)
    gain = format_points_estimate(m["gain"])
    return (gate.gate, format_percent_estimate(m["accuracy"]), format_percent(m["rate"].value), gain, auroc)


def draw_trade_off(gates: Sequence[GateResult]) -> str:
    """Accuracy against retrieval rate; the dot is a gate's own threshold, the grey line retrieves at random."""
    named = {gate.gate: gate for gate in gates}
    ranked = [gate for gate in gates if gate.frontier is not None and "auroc" in gate.measures][:MAX_CURVES]
    curves = [_curve(gate, colour) for gate, colour in zip(ranked, COLORS, strict=False)]
    ends = [
        ChartPoint(rate, named[name].measures["accuracy"].value or 0.0) for rate, name in ((0, "never"), (1, "always"))
    ]
    curves += [Curve("random", ends, GRAY, dashed=True), _curve(named["oracle"], "currentColor", dashed=True)]
    heights = [point.y for curve in curves for point in curve.points]
    return render_line_chart(curves, ChartFrame(Axis("retrieval rate"), fit_axis("accuracy", heights)))


def _curve(gate: GateResult, colour: str, *, dashed: bool = False) -> Curve:
    assert gate.frontier is not None
    rates = [step / CURVE_STEPS for step in range(CURVE_STEPS + 1)]
    m = gate.measures
    mark = None if dashed else ChartPoint(m["rate"].value or 0.0, m["accuracy"].value or 0.0)
    return Curve(gate.gate, [ChartPoint(rate, gate.frontier.at(rate)) for rate in rates], colour, dashed, mark)


@dataclass(frozen=True)
class GateGuarantee:
    """A guarantee in words. holds: for the LLM, the passages and the answers of these questions, and for skipping
    with nobody choosing after retrieval.

    loss: what it allows. chosen_on: how many of these questions the threshold was chosen on.
    """

    words: str
    holds: bool
    loss: float = 0.0
    chosen_on: int = 0


def read_guarantees(
    trial: LabelTable, gates: Sequence[str | Gate], *, plug_in: bool = False, arbiter: str | None = None
) -> dict[str, GateGuarantee]:
    """The guarantees of the fitted gates among these, by the names that tables call them.

    arbiter: fingerprint of the one that is tried here; what was proven with one is held against it.
    """
    fitted = [gate for gate in gates if gate != "auto" and get_gate_folder(gate) is not None]
    found = {
        get_gate_name(gate): _promised(
            trial, load_gate(gate, plug_in=plug_in) if isinstance(gate, str) else gate, arbiter
        )
        for gate in fitted
    }
    return {name: one for name, one in found.items() if one.words}


def _promised(trial: LabelTable, gate: Gate, arbiter: str | None) -> GateGuarantee:
    settings = trial.settings
    retriever = settings.get("retriever_fingerprint")
    used = Deployment(
        retriever=retriever,
        k=count_shown_passages(settings.get("k"), retriever),
        max_tokens=settings.get("max_tokens"),
        open_prompts=settings.get("open_prompts"),
        reranker=settings.get("reranker_fingerprint"),
        candidates=settings.get("candidates"),
        arbiter=None if has_guarantee_without_arbiter(gate) else arbiter,  # tables have every gate both ways
    )
    if not isinstance(gate, FittedGate):
        return GateGuarantee("", holds=False)
    holds = (
        gate.threshold != ALWAYS_RETRIEVE
        and has_guarantee_without_arbiter(gate)
        and not find_violated_conditions(gate, used)
    )
    file = gate.artifact.path / CALIBRATION_KEYS_FILE
    chosen = set(read_text(file).split()) if file.is_file() else set()
    loss = float((gate.artifact.manifest.get("guarantee") or {}).get("epsilon", 0.0))
    return GateGuarantee(
        describe_guarantee(gate, used), holds, loss, sum(str(key) in chosen for key in trial.question_fingerprints)
    )


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

    trial: LabelTable
    gates: list[GateResult]
    comparisons: list[PairedComparison]
    slices: list[SliceTable]
    resamples: int
    second: list[SecondLookResult] = field(default_factory=list)
    promises: dict[str, GateGuarantee] = field(default_factory=dict)  # guarantees of the gates that have one
    cascade: Cascade | None = None
    actions: list[ActionResult] = field(default_factory=list)

    def gate(self, name: str) -> GateResult:
        """What one gate came to, by its name in the tables."""
        by_name = {one.gate: one for one in self.gates}
        if name not in by_name:
            raise UnknownName("gate of this evaluation", name, by_name)
        return by_name[name]

    def __repr__(self) -> str:
        return f"<Evaluation on {self._about}>\n{build_short_table(self.gates).text()}"

    def _repr_html_(self) -> str:
        """For notebooks: the main table and the curves."""
        if self.trial.open_right is None:
            return build_short_table(self.gates).html()
        about = f"<p>Evaluation on {escape_html(self._about)}</p>"
        return f"{about}{build_answer_table(self.gates).html()}{draw_trade_off(self.gates)}"

    @property
    def _about(self) -> str:
        runs = ", ".join(Path(run).name for run in self.trial.runs)
        return f"{len(self.trial.rows)} questions of {self.trial.settings['model']} ({runs})"


def compare_gates(
    trial: LabelTable, scored: Sequence[TableScores], *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
) -> Evaluation:
    """Measure the gates; never and always are added, and the oracle where there are open-book answers."""
    if trial.open_right is None and (trial.closed_right.all() or not trial.closed_right.any()):
        kind = "right" if trial.closed_right.all() else "wrong"
        raise BadInput(
            f"every closed-book answer is {kind} and there are no open-book answers: nothing can be told apart. "
            "Evaluate other questions, or label them with passages."
        )
    draws = Bootstrap(len(trial.rows), resamples, seed)
    beside = build_baselines(trial)
    asked = [one for one in scored if one.name not in {line.name for line in beside}]
    results = measure_gates(trial, [*asked, *beside], draws)
    gates, drawn_lines = results[: len(asked)], [make_baseline_result(trial, one) for one in results[len(asked) :]]
    if not drawn_lines:
        return Evaluation(trial, gates, [], _slices(trial, gates), resamples)
    never, always, oracle = drawn_lines
    compared = _compare(gates, always)
    every = [never, always, *gates, oracle]
    return Evaluation(trial, every, compared, _slices(trial, every), resamples)


def _compare(gates: Sequence[GateResult], always: GateResult) -> list[PairedComparison]:
    """Each gate against always retrieving, and against the best of the others by accuracy."""
    if not gates:
        return []
    best = max(gates, key=lambda one: one.measures["accuracy"].value or 0.0)
    pairs = [(gate, always) for gate in gates] + [(best, gate) for gate in gates if gate is not best]
    compared = [_pair(first, second) for first, second in pairs]
    corrected = holm_correction([one.p_mcnemar for one in compared])
    return [replace(one, p_holm=p) for one, p in zip(compared, corrected, strict=True)]


def _pair(first: GateResult, second: GateResult) -> PairedComparison:
    differences = first.drawn["accuracy"] - second.drawn["accuracy"]
    gap = summarize_resamples(differences)
    p, only_first, only_second = mcnemar_test(first.right, second.right)
    return PairedComparison(
        first.gate, second.gate, gap.value or 0.0, gap.low or 0.0, gap.high or 0.0, bootstrap_p_value(differences), p,
        only_first, only_second,
    )  # fmt: skip


def _slices(trial: LabelTable, gates: Sequence[GateResult]) -> list[SliceTable]:
    tables = []
    for dimension in SLICE_DIMENSIONS:
        values = trial.get_slice_values(dimension)
        kinds = sorted({value for value in values if value is not None})
        kinds = list(FREQUENCY_THIRDS) if dimension == ANSWER_FREQUENCY and kinds else kinds
        if len(kinds) < 2:
            continue
        tables += [_slice(trial, gates, dimension, kind, values == kind) for kind in kinds]
    return tables


def _slice(trial: LabelTable, gates: Sequence[GateResult], dimension: str, value: str, inside: BoolArray) -> SliceTable:
    n = int(inside.sum())
    never = float(trial.closed_right[inside].mean()) if n else None
    always = float(trial.open_right[inside].mean()) if n and trial.open_right is not None else None
    return SliceTable(dimension, value, n, never, always, measure_slice(trial, gates, inside))


def evaluation_to_dict(evaluation: Evaluation) -> dict[str, Any]:
    """Every number of the report, without the rows."""
    trial = evaluation.trial
    return {
        "model": trial.settings["model"],
        "runs": trial.runs,
        "questions": len(trial.rows),
        "synthetic": int(trial.is_synthetic.sum()),
        "left_out": trial.left_out,
        "answered closed-book for want of passages": trial.n_without_passages,
        "grader": trial.settings["grader"],
        "resamples": evaluation.resamples,
        "majority": compute_majority_share(trial),
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


def _cascade_line(line: CascadeResult) -> dict[str, Any]:
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
