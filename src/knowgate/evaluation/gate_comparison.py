"""Comparison of gates on the same questions: measures, paired tests, slices, and stored guarantees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from knowgate.core.chart import COLORS, GRAY, Axis, ChartFrame, ChartPoint, Curve, fit_axis, render_line_chart
from knowgate.core.display import MISSING_VALUE, UNKNOWN_AMOUNT, TextTable, format_percent
from knowgate.core.validation import read_text
from knowgate.data.runs.records import TableScores
from knowgate.data.runs.rows import ANSWER_FREQUENCY, FREQUENCY_THIRDS, SLICE_DIMENSIONS
from knowgate.data.runs.table import LabelTable
from knowgate.errors import BadInput, UnknownName
from knowgate.evaluation import gate_results
from knowgate.evaluation.gate_results import GateResult
from knowgate.evaluation.post_retrieval import Cascade, SecondLookResult
from knowgate.evaluation.retrieval_actions import ActionResult
from knowgate.gates import load_gate
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.calibration import deployment
from knowgate.gates.calibration.evidence import CALIBRATION_KEYS_FILE, TARGET_KINDS
from knowgate.gates.fitted_gate import FittedGate, get_gate_folder, get_gate_name
from knowgate.labels.options import count_shown_passages
from knowgate.stats import proportions
from knowgate.stats.bootstrap import DEFAULT_RESAMPLES, Bootstrap, Estimate, bootstrap_p_value, summarize_resamples
from knowgate.stats.metrics import BoolArray
from knowgate.training.topics import TopicResult
from knowgate.types import Gate
from knowgate.types.markup import escape_html

CURVE_STEPS = 60
AGAINST_ALWAYS = "against always"
MAX_CURVES = len(COLORS)  # gates that get a curve of their own in the notebook chart
CALIBRATION_ENTRIES = (*TARGET_KINDS, "policy")  # entries in the manifest of a gate with a calibrated threshold


class SliceResult(NamedTuple):
    """Results of a gate on a group of questions, such as one language.

    Attributes:
        gate: Name of the gate.
        accuracy: Accuracy of the final answers.
        rate: Share of questions that the gate retrieves for.
        random: Accuracy of random retrieval at that rate.
    """

    gate: str
    accuracy: float
    rate: float
    random: float


@dataclass(frozen=True)
class SliceTable:
    """Accuracy of the gates on a group of questions, such as one language.

    Attributes:
        dimension: What the questions are grouped by, such as 'language'.
        value: The group, such as 'en'.
        n: Number of questions; 0 for an empty slice.
        never: Accuracy of never retrieving.
        always: Accuracy of always retrieving.
        rows: Results of the gates; empty if there are no questions, or no answers that used passages.
    """

    dimension: str
    value: str
    n: int
    never: float | None
    always: float | None
    rows: list[SliceResult]


@dataclass(frozen=True)
class GateGuarantee:
    """Proof that a gate loses few answers. It is stored with the gate's threshold.

    Attributes:
        text: The guarantee in words. If it does not hold here, the text says why. Empty if there is no guarantee.
        holds: Whether it applies to this LLM, these passages and answers, and the arbiter of this evaluation.
        max_loss: Loss of accuracy that it allows.
        n_calibrated: How many of the evaluated questions the threshold was chosen on.
        has_arbiter: Whether it includes the arbiter of this evaluation, which chooses between both answers after a search.
    """

    text: str
    holds: bool
    max_loss: float = 0.0
    n_calibrated: int = 0
    has_arbiter: bool = False


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Gates measured on the same questions. What `knowgate.evaluate` returns.

    Attributes:
        table: The questions with their recorded answers and grades.
        gates: Results of the baselines `never` and `always`, the gates, and the oracle (the best possible decisions).
        comparisons: Paired tests between gates.
        slices: Results on groups of questions: by data set, by language, and so on.
        resamples: Number of bootstrap resamples.
        second_looks: Results with a judge that drops useless passages, if one was given.
        guarantees: By gate, the stored proof that it loses few answers.
        with_judge: Names of the gates and arbiters that run a fine-tuned judge.
        cascade: Results with an arbiter after retrieval, if one was given.
        topics: Results by topic of the questions, if topics were asked for.
        actions: Results of choosing between skipping, one retrieval and several rounds, if searches were priced.
    """

    table: LabelTable
    gates: list[GateResult]
    comparisons: list[proportions.PairedComparison]
    slices: list[SliceTable]
    resamples: int
    second_looks: list[SecondLookResult] = field(default_factory=list)
    guarantees: dict[str, GateGuarantee] = field(default_factory=dict)
    with_judge: frozenset[str | None] = frozenset()
    cascade: Cascade | None = None
    actions: list[ActionResult] = field(default_factory=list)
    topics: list[TopicResult] = field(default_factory=list)

    def gate(self, name: str) -> GateResult:
        """Return the result of one gate.

        Args:
            name: Name of the gate in the tables.

        Raises:
            UnknownName: No gate of that name was evaluated.
        """
        by_name = {result.gate: result for result in self.gates}
        if name not in by_name:
            raise UnknownName("gate", name, by_name)
        return by_name[name]

    @property
    def has_open_answers(self) -> bool:
        """Whether any question was answered with passages."""
        return self.table.open_book_right is not None

    @property
    def ranking_gates(self) -> list[GateResult]:
        """The gates that rank questions by need: all but the baselines."""
        return [result for result in self.gates if result.can_rank]

    def __repr__(self) -> str:
        return f"<Evaluation on {self._description}>\n{build_short_table(self.gates).text()}"

    def _repr_html_(self) -> str:
        """Render the main table and the trade-off chart for notebooks."""
        if not self.has_open_answers:
            return build_short_table(self.gates).html()
        heading = f"<p>Evaluation on {escape_html(self._description)}</p>"
        return f"{heading}{build_answer_table(self.gates).html()}{draw_trade_off(self.gates)}"

    @property
    def _description(self) -> str:
        runs = ", ".join(Path(run).name for run in self.table.runs)
        return f"{len(self.table.rows)} questions of {self.table.settings['model']} ({runs})"


def compare_gates(
    table: LabelTable, scores: Sequence[TableScores], *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
) -> Evaluation:
    """Measure gates on the same questions and compare them in pairs.

    Args:
        table: Labeled questions.
        scores: For each gate, the need for retrieval that it gives to each question. The baselines `never`, `always`
            and `oracle` are added if the questions have open-book answers.
        resamples: Bootstrap resamples for the intervals.
        seed: Seed of the resamples.

    Raises:
        BadInput: All closed-book answers have the same grade and there are no open-book answers.
    """
    _check_distinguishable(table)
    bootstrap = Bootstrap(len(table.rows), resamples, seed)
    baseline_scores = gate_results.build_baselines(table)
    baseline_names = {baseline.gate for baseline in baseline_scores}
    gate_scores = [scores_of_gate for scores_of_gate in scores if scores_of_gate.gate not in baseline_names]
    # Gates and baselines are measured together, so that they share their resamples.
    results = gate_results.measure_gates(table, [*gate_scores, *baseline_scores], bootstrap)
    gates, comparisons = results[: len(gate_scores)], []
    if baseline_scores:
        baseline_results = results[len(gate_scores) :]
        never, always, oracle = (gate_results.make_baseline_result(table, result) for result in baseline_results)
        comparisons = _compare_pairs(gates, always)
        gates = [never, always, *gates, oracle]
    return Evaluation(table, gates, comparisons, _measure_slices(table, gates), resamples)


def _check_distinguishable(table: LabelTable) -> None:
    """Raise BadInput if no answer used passages and all answers have the same grade, so that gates cannot be compared."""
    closed_book_right = table.closed_book_right
    if table.open_book_right is None and (closed_book_right.all() or not closed_book_right.any()):
        grade = "right" if closed_book_right.all() else "wrong"
        raise BadInput(
            f"the gates cannot be compared, because every answer without passages is {grade}. Evaluate other questions, or also "
            "record answers with passages."
        )


def _compare_pairs(gates: Sequence[GateResult], always: GateResult) -> list[proportions.PairedComparison]:
    """Test each gate against always retrieving, and the best gate against the others. P-values are Holm-corrected."""
    if not gates:
        return []
    best = max(gates, key=lambda gate: gate.measures["accuracy"].value or 0.0)
    pairs = [(gate, always) for gate in gates] + [(best, gate) for gate in gates if gate is not best]
    comparisons = [_compare_pair(first, second) for first, second in pairs]
    corrected = proportions.holm_correction([comparison.p_mcnemar for comparison in comparisons])
    return [replace(comparison, p_holm=p_value) for comparison, p_value in zip(comparisons, corrected, strict=True)]


def _compare_pair(first: GateResult, second: GateResult) -> proportions.PairedComparison:
    """Compare the accuracies of two gates by bootstrap and by McNemar's test."""
    differences = first.resampled["accuracy"] - second.resampled["accuracy"]  # one per resample
    difference = summarize_resamples(differences)
    p_value, only_first, only_second = proportions.mcnemar_test(first.right, second.right)
    return proportions.PairedComparison(
        gate=first.gate,
        against=second.gate,
        difference=difference.value or 0.0,
        low=difference.low or 0.0,
        high=difference.high or 0.0,
        p_bootstrap=bootstrap_p_value(differences),
        p_mcnemar=p_value,
        only_gate=only_first,
        only_against=only_second,
    )


def _measure_slices(table: LabelTable, gates: Sequence[GateResult]) -> list[SliceTable]:
    """Measure the gates on groups of questions, such as all questions of one language."""
    tables = []
    for dimension in SLICE_DIMENSIONS:
        group_of_row = table.get_slice_values(dimension)
        groups = sorted({group for group in group_of_row if group is not None})
        if dimension == ANSWER_FREQUENCY and groups:
            groups = list(FREQUENCY_THIRDS)  # in their own order, and even if one is empty
        if len(groups) > 1:
            tables += [_measure_slice(table, gates, dimension, group, group_of_row == group) for group in groups]
    return tables


def _measure_slice(
    table: LabelTable, gates: Sequence[GateResult], dimension: str, value: str, in_slice: BoolArray
) -> SliceTable:
    """Measure the gates on one group of questions, such as the dimension 'language' with the value 'en'.

    `in_slice` marks the questions of the group.
    """
    n = int(in_slice.sum())
    never = float(table.closed_book_right[in_slice].mean()) if n else None
    if never is None or table.open_book_right is None:
        return SliceTable(dimension, value, n, never, always=None, rows=[])
    always = float(table.open_book_right[in_slice].mean())
    rows = []
    for gate in gates:
        accuracy = float(gate.right[in_slice].mean())
        rate = float(gate.retrieve[in_slice].mean())
        rows.append(SliceResult(gate.gate, accuracy, rate, random=rate * always + (1 - rate) * never))
    return SliceTable(dimension, value, n, never, always, rows)


# --- guarantees -----------------------------------------------------------------------------------


def read_guarantees(
    table: LabelTable, gates: Sequence[str | Gate], *, plug_in: bool = False, arbiter: str | None = None
) -> dict[str, GateGuarantee]:
    """Read the guarantees of fitted gates and check them for these questions.

    A guarantee proves that the gate loses few answers.

    Args:
        table: Questions that the gates are evaluated on.
        gates: Gate specs, folders or gates.
        plug_in: Also load gates that were fitted on another LLM.
        arbiter: Fingerprint of the arbiter of this evaluation, which chooses between the answers with and without
            passages; None if there is none.

    Returns:
        Guarantees by the gate's name in the tables. Gates without a calibrated threshold are missing.
    """
    guarantees = {}
    for gate in [gate for gate in gates if gate != "auto" and get_gate_folder(gate) is not None]:
        loaded = load_gate(gate, plug_in=plug_in) if isinstance(gate, str) else gate
        if isinstance(loaded, FittedGate) and any(name in loaded.artifact.manifest for name in CALIBRATION_ENTRIES):
            guarantees[get_gate_name(gate)] = _check_guarantee(table, loaded, arbiter)
    return guarantees


def _check_guarantee(table: LabelTable, gate: FittedGate, arbiter: str | None) -> GateGuarantee:
    """Check whether the proof that a gate loses few answers holds for these questions.

    It holds if the LLM, the prompts, the passages and the arbiter are those of the proof.

    Args:
        table: The questions, with the settings that they were answered with.
        gate: The gate. If it has no guarantee, the text of the result is ''.
        arbiter: Fingerprint of the arbiter that chooses between the answers with and without passages; None without one.
    """
    evidence = gate.artifact.manifest.get("guarantee") or {}
    proven_arbiter = (evidence.get("arbiter") or {}).get("fingerprint")
    uses_proven_arbiter = arbiter is not None and arbiter == proven_arbiter
    proven_without_arbiter = deployment.has_guarantee_without_arbiter(gate)
    # The tables show every gate also without the arbiter. A guarantee without one refers to those results.
    conditions = _describe_deployment(table, None if proven_without_arbiter else arbiter)
    # The threshold is ALWAYS_RETRIEVE if nothing could be proven.
    has_proven_threshold = proven_without_arbiter and gate.threshold != ALWAYS_RETRIEVE
    is_violated = bool(deployment.find_violated_conditions(gate, conditions))
    return GateGuarantee(
        text=deployment.describe_guarantee(gate, conditions),
        holds=(uses_proven_arbiter or has_proven_threshold) and not is_violated,
        max_loss=float(evidence.get("epsilon", 0.0)),
        n_calibrated=_count_calibration_questions(table, gate),
        has_arbiter=uses_proven_arbiter,
    )


def _describe_deployment(table: LabelTable, arbiter: str | None) -> deployment.Deployment:
    """Describe how the questions were answered. `arbiter` is a fingerprint, or None."""
    settings = table.settings
    retriever = settings.get("retriever_fingerprint")
    return deployment.Deployment(
        retriever=retriever,
        k=count_shown_passages(settings.get("k"), retriever),
        max_tokens=settings.get("max_tokens"),
        open_prompts=settings.get("open_prompts"),
        reranker=settings.get("reranker_fingerprint"),
        candidates=settings.get("candidates"),
        arbiter=arbiter,
    )


def _count_calibration_questions(table: LabelTable, gate: FittedGate) -> int:
    """Count the questions that the gate's threshold was chosen on."""
    keys_file = gate.artifact.path / CALIBRATION_KEYS_FILE
    calibration_keys = set(read_text(keys_file).split()) if keys_file.is_file() else set()
    return sum(str(key) in calibration_keys for key in table.question_fingerprints)


# --- summary for notebooks and terminals ----------------------------------------------------------


def build_answer_table(gates: Sequence[GateResult]) -> TextTable:
    """Build the main table, with one row per gate. 'matched random' retrieves as often as the gate, but at random."""
    return TextTable.build("Answers", gates, ANSWER_COLUMNS)


def _format_milliseconds(gate: GateResult) -> str:
    """Format the milliseconds of deciding; baselines decide nothing."""
    if not gate.can_rank:
        return MISSING_VALUE
    seconds = gate.cost.decision_seconds
    return UNKNOWN_AMOUNT if seconds is None else f"{1_000 * seconds:.1f}"


def build_short_table(gates: Sequence[GateResult]) -> TextTable:
    """Build a narrow table with a row per gate.

    Accuracy and cost are shown only if answers that used passages (open-book answers) were recorded.
    """
    columns: dict[str, Callable[[GateResult], str]] = {"gate": lambda gate: gate.gate}
    has_open_answers = any("accuracy" in gate.measures for gate in gates)
    if has_open_answers:
        columns |= {
            "threshold": format_threshold,
            "accuracy": lambda gate: format_percent(gate.measures["accuracy"].value),
            "retrieval": lambda gate: format_percent(gate.measures["rate"].value),
            "LLM calls": lambda gate: f"{gate.cost.calls:.2f}",
            AGAINST_ALWAYS: _format_against_always,
        }
    columns["AUROC"] = lambda gate: format_estimate(gate.measures.get("auroc"))
    title = "Gates compared, each at its own threshold" if has_open_answers else "Gates compared"
    return TextTable.build(title, gates, columns)


def format_threshold(gate: GateResult) -> str:
    """Format the threshold of a gate; a dash for baselines, which have none."""
    return f"{gate.threshold:.3g}" if gate.can_rank else MISSING_VALUE


def format_estimate(estimate: Estimate | None) -> str:
    """Format an estimate with its interval; a dash if there is none."""
    return MISSING_VALUE if estimate is None or estimate.value is None else estimate.format()


def _format_against_always(gate: GateResult) -> str:
    """Format the accuracy of a gate minus that of always retrieving, with its interval."""
    resampled_losses = gate.resampled["loss"]  # the accuracy of always retrieving minus that of the gate
    return proportions.format_points_estimate(summarize_resamples(-resampled_losses))


ANSWER_COLUMNS: dict[str, Callable[[GateResult], str]] = {
    "gate": lambda gate: gate.gate,
    "accuracy": lambda gate: proportions.format_percent_estimate(gate.measures["accuracy"]),
    "retrieval": lambda gate: format_percent(gate.measures["rate"].value),
    "LLM calls": lambda gate: f"{gate.cost.calls:.2f}",
    "deciding, ms": _format_milliseconds,
    "generated tokens": lambda gate: UNKNOWN_AMOUNT if gate.cost.completion is None else f"{gate.cost.completion:.1f}",
    "matched random": lambda gate: format_percent(gate.measures["random"].value),
    "gain": lambda gate: proportions.format_points_estimate(gate.measures["gain"]),
    AGAINST_ALWAYS: _format_against_always,
    "harm": lambda gate: format_percent(gate.measures["harm"].value),
    "waste": lambda gate: format_percent(gate.measures["waste"].value),
    "headroom": lambda gate: format_percent(gate.measures["recovered"].value),
}


def draw_trade_off(gates: Sequence[GateResult]) -> str:
    """Draw accuracy against retrieval rate as SVG, with one curve per gate."""
    by_name = {gate.gate: gate for gate in gates}
    ranked = [gate for gate in gates if gate.frontier is not None and gate.can_rank][:MAX_CURVES]
    curves = [_make_frontier_curve(gate, color) for gate, color in zip(ranked, COLORS, strict=False)]
    never, always = (by_name[name].measures["accuracy"].value or 0.0 for name in ("never", "always"))
    random = Curve("random", [ChartPoint(0, never), ChartPoint(1, always)], GRAY, dashed=True)
    oracle = _make_frontier_curve(by_name["oracle"], "currentColor", dashed=True)
    curves += [random, oracle]
    heights = [point.y for curve in curves for point in curve.points]
    return render_line_chart(curves, ChartFrame(Axis("retrieval rate"), fit_axis("accuracy", heights)))


def _make_frontier_curve(gate: GateResult, color: str, *, dashed: bool = False) -> Curve:
    """Make the curve of accuracy by retrieval rate. A dot marks the gate's own threshold."""
    assert gate.frontier is not None
    rates = [step / CURVE_STEPS for step in range(CURVE_STEPS + 1)]
    points = [ChartPoint(rate, gate.frontier.at(rate)) for rate in rates]
    own_point = ChartPoint(gate.measures["rate"].value or 0.0, gate.measures["accuracy"].value or 0.0)
    dot = None if dashed else own_point
    return Curve(gate.gate, points, color, dashed, dot)
