"""Effect of checks after retrieval: an arbiter, and a judge of passages.

The arbiter chooses between the answers with and without passages. The judge drops passages that it finds useless. Both
decide once per label run; their verdicts are stored with the run and reused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from knowgate.core import split_batches
from knowgate.core.display import TextTable, format_percent, format_points
from knowgate.data.runs.records import RecordedUsefulness, TableScores, read_usefulness, write_usefulness
from knowgate.data.runs.rows import LabelRow
from knowgate.data.runs.storage import question_from_row
from knowgate.data.runs.table import LabelTable
from knowgate.errors import BadSetting
from knowgate.evaluation.gate_results import estimate_column_means
from knowgate.gates import load_gate
from knowgate.gates.arbiters.offline_arbitration import ArbiterChoices
from knowgate.gates.artifacts.gate_folder import FittedGateSpec, parse_fitted_spec, read_artifact
from knowgate.gates.offline_scoring import check_unseen
from knowgate.stats.bootstrap import Bootstrap, Estimate
from knowgate.stats.metrics import BoolArray
from knowgate.stats.proportions import format_p_value, format_percent_estimate, format_points_estimate, mcnemar_test
from knowgate.types import PassageFilter

log = logging.getLogger(__name__)
SECOND_LOOK_BATCH = 32
COMPARED_SUFFIX = ", better than without"  # of a judge that compares the answers with and without passages


# --- cascade: gate, then arbiter ------------------------------------------------------------------


@dataclass(frozen=True)
class CascadeResult:
    """Results of a cascade: a gate, then an arbiter. After a search, the arbiter picks one of two answers.

    The baseline always gives the answer with passages.

    Attributes:
        gate: Name of the gate.
        rate: Share of questions that the gate retrieves for.
        alone: Accuracy of the gate without the arbiter.
        accuracy: Accuracy of the cascade.
        change: `accuracy` minus `alone`.
        against_always: `accuracy` minus the accuracy of the baseline.
        p_mcnemar: p-value of `against_always` by McNemar's test.
        harmed: Share of questions that only the baseline answers correctly.
        gained: Share of questions that only the cascade answers correctly.
        right: Whether the cascade answers each question correctly.
        calls: LLM calls per question, including both answers of each question that the gate retrieves for.
    """

    gate: str
    rate: float
    alone: float
    accuracy: Estimate
    change: Estimate
    against_always: Estimate
    p_mcnemar: float
    harmed: float
    gained: float
    right: BoolArray = field(repr=False, compare=False)
    calls: float = 0.0


@dataclass(frozen=True)
class Cascade:
    """Results of all gates, each followed by the same arbiter.

    The arbiter picks the answer with or without passages after a search.

    Attributes:
        arbiter: Name of the arbiter.
        fingerprint: Fingerprint of the arbiter.
        from_memory: Share of all questions for which the arbiter would choose the answer without passages, if it were
            called for every question.
        results: One result per gate.
        is_policy: Whether the arbiter is that of the evaluated policy, so that these results are those of the policy.
    """

    arbiter: str
    fingerprint: str
    from_memory: float
    results: list[CascadeResult]
    is_policy: bool = False

    @property
    def arbiter_right(self) -> BoolArray:
        """Whether the arbiter's choice between both answers is right, for each question."""
        # After the gate 'always', which retrieves for every question, the arbiter decides alone.
        return next(result.right for result in self.results if result.gate == "always")


def evaluate_cascade(
    table: LabelTable, gates: Sequence[TableScores], choices: ArbiterChoices, bootstrap: Bootstrap
) -> Cascade:
    """Measure each gate with an arbiter. After a search, the arbiter picks one of two answers.

    Args:
        table: Labeled questions.
        gates: The need for retrieval that each gate gives to each question.
        choices: For each question, whether the arbiter would choose the answer without passages (`from_memory`), and
            whether the answer that it would choose is right (`right`).
        bootstrap: Resamples for the intervals.
    """
    results = [_measure_cascade(table, gate, choices.right, bootstrap) for gate in gates]
    return Cascade(choices.name, choices.fingerprint, float(choices.from_memory.mean()), results)


def _measure_cascade(
    table: LabelTable, gate: TableScores, arbiter_right: BoolArray, bootstrap: Bootstrap
) -> CascadeResult:
    """Measure one gate with the arbiter, which picks one of two answers after a search.

    The cascade of gate and arbiter is compared with the gate alone (`change`) and with always retrieving (the other
    comparisons).

    Args:
        table: Labeled questions.
        gate: The gate.
        arbiter_right: Whether the answer that the arbiter would choose is right, for each question.
        bootstrap: Resamples for the intervals.
    """
    retrieve = gate.needs > gate.threshold
    rate = float(retrieve.mean())
    always_right = table.retrieved_right.astype(float)
    right_without_arbiter = np.where(retrieve, always_right, table.closed_book_right)
    right = np.where(retrieve, arbiter_right, table.closed_book_right)
    columns = {"accuracy": right, "change": right - right_without_arbiter, "against_always": right - always_right}
    p_value, n_gained, n_harmed = mcnemar_test(right, table.retrieved_right)
    return CascadeResult(
        gate=gate.gate,
        rate=rate,
        alone=float(right_without_arbiter.mean()),
        p_mcnemar=p_value,
        harmed=n_harmed / len(right),
        gained=n_gained / len(right),
        right=right,
        calls=1 + gate.calls + rate,  # closed-book answer, calls of the gate, open-book answer
        **estimate_column_means(bootstrap, columns),
    )


CASCADE_COLUMNS: dict[str, Callable[[CascadeResult], str]] = {
    "gate": lambda result: result.gate,
    "retrieval": lambda result: format_percent(result.rate),
    "LLM calls": lambda result: f"{result.calls:.2f}",
    "accuracy, no arbiter": lambda result: format_percent(result.alone),
    "accuracy, cascade": lambda result: format_percent_estimate(result.accuracy),
    "change": lambda result: format_points_estimate(result.change),
    "against always": lambda result: format_points_estimate(result.against_always),
    "p": lambda result: format_p_value(result.p_mcnemar),
    "harmed": lambda result: format_percent(result.harmed),
    "gained": lambda result: format_percent(result.gained),
}


def build_cascade_table(cascade: Cascade) -> TextTable:
    """Build the table of all gates with the arbiter. 'always' shows the arbiter alone."""
    kind = "The policy as it runs" if cascade.is_policy else "Cascade"
    title = f"{kind}: the arbiter {cascade.arbiter} chooses after retrieval"
    return TextTable.build(title, cascade.results, CASCADE_COLUMNS)


# --- second look: a judge drops useless passages (KBM, section 5.4) -------------------------------


@dataclass(frozen=True)
class SecondLookResult:
    """Results of one gate with and without a judge of passages. The judge drops useless passages before answering.

    Attributes:
        gate: Name of the gate.
        rate: Retrieval rate of the gate.
        once: Accuracy if only the gate looks at a question, without the judge.
        twice: Accuracy if the judge takes a second look.
        difference: `twice` minus `once`.
        random: Accuracy if the passages of as many questions are dropped at random.
        shown: Share of questions for which the LLM is shown passages, because the judge keeps them.
    """

    gate: str
    rate: float
    once: float
    twice: float
    difference: Estimate
    random: float
    shown: float


def judge_passages(table: LabelTable, spec: str) -> BoolArray:
    """Return whether a judge finds the passages of each row useful.

    Args:
        table: Rows with passages.
        spec: Folder of a fitted KBM gate, which is the value of the option `second_look`. 'FOLDER,verdict=own' uses the
            rule of the KBM paper.

    Raises:
        BadSetting: The gate cannot judge passages, was fitted on these rows, or the rows hold no texts.
    """
    check_unseen(table, _parse_judge_spec(spec).folder)
    judge = load_gate(spec, plug_in=True).passage_filter
    if judge is None:
        raise BadSetting(f"second_look={spec!r} cannot tell whether passages help. Use a gate of `knowgate fit kbm`.")
    useful = np.zeros(len(table.rows), dtype=bool)
    for run in table.split_by_run():
        rows = list(table.subset(run.numbers).rows)
        verdicts = judge_run_passages(run.path, rows, spec, judge)
        useful[run.numbers] = [verdicts[row.id] for row in rows]
    return useful


def _parse_judge_spec(spec: str) -> FittedGateSpec:
    """Split 'FOLDER,verdict=own' into the judge's folder and rule."""
    return parse_fitted_spec(spec) or FittedGateSpec(spec)


def judge_run_passages(run: Path, rows: Sequence[LabelRow], spec: str, judge: PassageFilter) -> dict[str, bool]:
    """Return the judge's verdict on each row's passages, by row id. Stored verdicts are reused.

    Args:
        run: Folder of the label run.
        rows: Its rows.
        spec: Folder of the judge, followed by ',verdict=own' if it judges by the paper's rule.
        judge: The loaded judge.
    """
    folder, rule = _parse_judge_spec(spec)
    artifact = read_artifact(folder)
    # Verdicts by the default rule are stored with a suffix. Verdicts by the paper's rule ('own') have none, because
    # version 0.1, which had no other rule, stored none.
    judge_name = artifact.path.name if rule == "own" else artifact.path.name + COMPARED_SUFFIX
    fingerprint = str(artifact.manifest["checksum"])
    verdicts = _read_verdicts(run, judge_name, fingerprint)
    unjudged = [row for row in rows if row.id not in verdicts]
    if unjudged:
        _check_texts(run, unjudged)
        log.info("%s judges the passages of %d questions", judge_name, len(unjudged))
        verdicts |= _judge_rows(judge, unjudged)
        write_usefulness(run, RecordedUsefulness(judge_name, fingerprint, verdicts))
    return verdicts


def _read_verdicts(run: Path, judge_name: str, fingerprint: str) -> dict[str, bool]:
    """Read the stored verdicts of a judge, by row id."""
    verdicts: dict[str, bool] = {}
    for record in read_usefulness(run):
        if record.judge == judge_name and record.fingerprint == fingerprint:
            verdicts |= record.useful
    return verdicts


def _judge_rows(judge: PassageFilter, rows: Sequence[LabelRow]) -> dict[str, bool]:
    """Let the judge decide on each row's passages, batch by batch."""
    verdicts: dict[str, bool] = {}
    for batch in split_batches(rows, SECOND_LOOK_BATCH):
        useful = judge.are_useful([question_from_row(row) for row in batch], [row.passages for row in batch])
        verdicts.update(zip([row.id for row in batch], useful, strict=True))
    return verdicts


def _check_texts(run: Path, rows: Sequence[LabelRow]) -> None:
    """Raise BadSetting if rows with an open-book answer hold no question or passages to judge."""
    missing = sum(row.open is not None and not (row.passages and row.question) for row in rows)
    if missing:
        raise BadSetting(
            f"`second_look` reads questions and passages, but {missing} rows of '{run}' have no texts. Use the label "
            "run (recorded answers) that still has the texts."
        )


def evaluate_second_look(
    table: LabelTable, gates: Sequence[TableScores], useful: BoolArray, bootstrap: Bootstrap
) -> list[SecondLookResult]:
    """Measure every gate with and without a judge. `useful` is the judge's verdict on the passages of each question."""
    if table.open_book_right is None:
        raise BadSetting(
            "`second_look` needs answers with passages, but the recorded answers have none. Run `knowgate label` with `index`."
        )
    return [_measure_second_look(table, gate, useful, bootstrap) for gate in gates]


def _measure_second_look(
    table: LabelTable, gate: TableScores, useful: BoolArray, bootstrap: Bootstrap
) -> SecondLookResult:
    """Measure a gate with and without a judge. The judge drops passages that are not `useful`."""
    closed_book_right, open_book_right = table.closed_book_right, table.retrieved_right
    retrieve = gate.needs > gate.threshold
    is_shown = retrieve & useful  # whether the LLM is shown the passages, because the judge keeps them
    right_without_judge = np.where(retrieve, open_book_right, closed_book_right)
    right_with_judge = np.where(is_shown, open_book_right, closed_book_right)
    # The baseline is a judge that drops the passages of as many questions, but at random.
    shown_share = float(is_shown.sum() / max(1, retrieve.sum()))
    expected_right = shown_share * open_book_right + (1 - shown_share) * closed_book_right
    right_with_random_judge = np.where(retrieve, expected_right, closed_book_right)
    changes = right_with_judge.astype(float) - right_without_judge.astype(float)
    return SecondLookResult(
        gate=gate.gate,
        rate=float(retrieve.mean()),
        once=float(right_without_judge.mean()),
        twice=float(right_with_judge.mean()),
        random=float(right_with_random_judge.mean()),
        shown=float(is_shown.mean()),
        **estimate_column_means(bootstrap, {"difference": changes}),
    )


def build_second_look_table(results: Sequence[SecondLookResult]) -> TextTable:
    """Build the table of gates with and without a judge. 'Two looks' means the gate, then the judge."""
    columns: dict[str, Callable[[SecondLookResult], str]] = {
        "gate": lambda result: result.gate,
        "retrieval": lambda result: format_percent(result.rate),
        "accuracy, one look": lambda result: format_percent(result.once),
        "accuracy, two looks": lambda result: format_percent(result.twice),
        "change": lambda result: format_points_estimate(result.difference),
        "against random drop": lambda result: format_points(result.twice - result.random),
        "passages shown": lambda result: format_percent(result.shown),
    }
    return TextTable.build("Second look at the passages (KBM, Figure 8)", results, columns)
