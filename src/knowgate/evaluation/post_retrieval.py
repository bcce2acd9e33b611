"""The cascade on recorded rows: skip, or retrieve and let an arbiter choose. Each gate with and without the arbiter.

The arbiter is asked once for each run; what it believed is kept beside the rows and read from there the next time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from knowgate.core.display import MISSING_VALUE, TextTable, format_percent, format_points
from knowgate.data.runs.records import RecordedUsefulness, read_usefulness, write_usefulness
from knowgate.data.runs.rows import LabelRow
from knowgate.data.runs.storage import question_from_row
from knowgate.data.runs.table import LabelTable, name_runs
from knowgate.errors import BadSetting
from knowgate.evaluation.frontier import compute_frontier
from knowgate.gates import load_gate
from knowgate.gates.arbiters.offline_arbitration import ArbiterChoices
from knowgate.gates.artifacts.gate_folder import read_artifact
from knowgate.gates.offline_scoring import TableScores, check_unseen
from knowgate.stats.bootstrap import Bootstrap, Estimate, summarize_resamples
from knowgate.stats.formats import format_percent_estimate, format_points_estimate
from knowgate.stats.metrics import BoolArray, FloatArray, WeightMatrix, weighted_mean
from knowgate.stats.proportions import mcnemar_test
from knowgate.types import PassageFilter

CASCADE_RATES: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)  # retrieval rates whose accuracy the table shows


@dataclass(frozen=True)
class CascadeResult:
    """One gate before the arbiter. accuracy: of the cascade; alone: of the gate without arbiter.

    against_always: accuracy minus that of always giving the open-book answer, with McNemar's p of the two.
    harmed, gained: share of questions that one has right and the other wrong. at_rate: accuracy of the cascade when so
    many questions, those of highest need, are retrieved for. right: the cascade's answer to each question.
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
    at_rate: dict[float, float]
    right: BoolArray = field(repr=False, compare=False)


@dataclass(frozen=True)
class Cascade:
    """What an arbiter does behind every gate. from_memory: how often it gives that answer if all are retrieved for."""

    arbiter: str
    fingerprint: str
    from_memory: float
    lines: list[CascadeResult]


def evaluate_cascade(
    trial: LabelTable, gates: Sequence[TableScores], choices: ArbiterChoices, draws: Bootstrap
) -> Cascade:
    """Every gate, and always retrieving, with this arbiter behind it."""
    lines = [_line(trial, gate, choices.right, draws) for gate in gates]
    return Cascade(choices.name, choices.fingerprint, float(choices.from_memory.mean()), lines)


def _line(trial: LabelTable, gate: TableScores, given: BoolArray, draws: Bootstrap) -> CascadeResult:
    closed, opened, retrieve = trial.closed_right, trial.always_right, gate.needs > gate.threshold
    alone, right = np.where(retrieve, opened, closed), np.where(retrieve, given, closed)
    table = np.stack([right, right.astype(float) - alone, right.astype(float) - opened], axis=1).astype(np.float64)

    def measure(weights: WeightMatrix) -> dict[str, np.ndarray]:
        return dict(zip(("accuracy", "change", "against"), weighted_mean(weights, table).T, strict=True))

    drawn = draws.apply([measure])[0]
    curve = compute_frontier(closed, given, gate.needs)
    p, gained, harmed = mcnemar_test(right, opened)
    n = len(right)
    return CascadeResult(
        gate.name,
        float(retrieve.mean()),
        float(alone.mean()),
        summarize_resamples(drawn["accuracy"]),
        summarize_resamples(drawn["change"]),
        summarize_resamples(drawn["against"]),
        p,
        harmed / n,
        gained / n,
        {rate: curve.at(rate) for rate in CASCADE_RATES},
        right,
    )


def build_cascade_table(cascade: Cascade) -> TextTable:
    """Every gate with the arbiter behind it; 'always' is the arbiter alone."""
    columns = (
        "gate", "retrieval", "accuracy, no arbiter", "accuracy, cascade", "change", "against always", "p", "harmed",
        "gained", *(f"cascade at {rate:.0%}" for rate in CASCADE_RATES),
    )  # fmt: skip
    rows = tuple(_row(line) for line in cascade.lines)
    return TextTable(f"Cascade: the arbiter {cascade.arbiter} chooses after retrieval", columns, rows)


def _row(line: CascadeResult) -> tuple[str, ...]:
    return (
        line.gate,
        format_percent(line.rate),
        format_percent(line.alone),
        format_percent_estimate(line.accuracy),
        format_points_estimate(line.change),
        format_points_estimate(line.against_always),
        "< 0.001" if line.p_mcnemar < 0.001 else f"{line.p_mcnemar:.3f}",
        format_percent(line.harmed),
        format_percent(line.gained),
        *(format_percent(value) for value in line.at_rate.values()),
    )


log = logging.getLogger(__name__)
SECOND_LOOK_BATCH = 32


@dataclass(frozen=True)
class SecondLookResult:
    """One gate, judging once and twice. shown: share of questions whose LLM sees passages after the second look.

    random: accuracy of dropping as many passages at random. words: of passages per question, None where the rows hold
    no texts.
    """

    gate: str
    rate: float
    once: float
    twice: float
    difference: Estimate
    random: float
    shown: float
    words_once: float | None
    words_twice: float | None


def judge_trial_passages(trial: LabelTable, folder: str) -> BoolArray:
    """Whether the judge in this folder finds the passages of each row of use."""
    check_unseen(trial, folder)
    judge = _judge(folder)
    found: dict[str, bool] = {}
    for run, name in zip(map(Path, trial.runs), name_runs([Path(run) for run in trial.runs]), strict=True):
        rows = [row for row, key in zip(trial.rows, trial.keys, strict=True) if key == f"{name}/{row.id}"]
        found |= {f"{name}/{key}": verdict for key, verdict in judge_run_passages(run, rows, folder, judge).items()}
    return np.array([found[key] for key in trial.keys], dtype=bool)


def _judge(folder: str) -> PassageFilter:
    looks = load_gate(folder, plug_in=True).passage_filter
    if looks is None:
        raise BadSetting(f"the gate '{folder}' cannot judge passages; --second-look takes a fitted kbm gate.")
    return looks


def judge_run_passages(run: Path, rows: Sequence[LabelRow], folder: str, judge: PassageFilter) -> dict[str, bool]:
    """The verdicts on record, and those of rows that have none, which are then on record too."""
    made = read_artifact(folder)
    name, fingerprint = made.path.name, str(made.manifest["checksum"])
    before = [item for item in read_usefulness(run) if (item.judge, item.fingerprint) == (name, fingerprint)]
    known = dict(before[0].useful) if before else {}
    waiting = [row for row in rows if row.id not in known]
    _check_passages(run, waiting)
    if waiting:
        log.info("%s looks at the passages of %d questions", name, len(waiting))
    for start in range(0, len(waiting), SECOND_LOOK_BATCH):
        part = waiting[start : start + SECOND_LOOK_BATCH]
        said = judge.are_useful([question_from_row(row) for row in part], [row.passages for row in part])
        known |= dict(zip((row.id for row in part), said, strict=True))
    if waiting:
        write_usefulness(run, RecordedUsefulness(name, fingerprint, known))
    return known


def _check_passages(run: Path, rows: Sequence[LabelRow]) -> None:
    packed = sum(row.open is not None and not (row.passages and row.question) for row in rows)
    if packed:
        raise BadSetting(
            f"'{run}' is packed without questions or passages ({packed} rows), which the second look would judge. "
            "Use the run it was made from."
        )


def evaluate_second_look(
    trial: LabelTable, gates: Sequence[TableScores], useful: BoolArray, draws: Bootstrap
) -> list[SecondLookResult]:
    """Every gate with and without the second look, between never and always."""
    if trial.open_right is None:
        raise BadSetting("--second-look drops passages, and no row has an open-book answer. Label with passages.")
    return [_second_look_line(trial, gate, useful, draws) for gate in gates]


def _second_look_line(trial: LabelTable, gate: TableScores, useful: BoolArray, draws: Bootstrap) -> SecondLookResult:
    closed, opened = trial.closed_right, trial.always_right
    retrieve = gate.needs > gate.threshold
    shown = retrieve & useful
    once, twice = np.where(retrieve, opened, closed), np.where(shown, opened, closed)
    changes: FloatArray = twice.astype(float) - once.astype(float)
    kept = float(shown.sum() / max(1, retrieve.sum()))
    random = np.where(retrieve, kept * opened + (1 - kept) * closed, closed)
    drawn = draws.apply([lambda weights: {"gain": weighted_mean(weights, changes)}])[0]
    words = _words(trial)
    return SecondLookResult(
        gate.name,
        float(retrieve.mean()),
        float(once.mean()),
        float(twice.mean()),
        summarize_resamples(drawn["gain"]),
        float(random.mean()),
        float(shown.mean()),
        None if words is None else float((words * retrieve).mean()),
        None if words is None else float((words * shown).mean()),
    )


def _words(trial: LabelTable) -> FloatArray | None:
    counts = np.array([sum(len(passage.text.split()) for passage in row.passages) for row in trial.rows], dtype=float)
    return counts if counts.any() else None


def build_second_look_table(lines: Sequence[SecondLookResult]) -> TextTable:
    """Figure 8 as a table: LLM only (never), all RAG (always) and every gate, judged once and twice."""
    columns = (
        "gate", "retrieval", "accuracy, one look", "accuracy, two looks", "change", "against random drop",
        "passages shown", "words of passages", "after two looks",
    )  # fmt: skip
    return TextTable(
        "Second look at the passages (KBM, Figure 8)", columns, tuple(_second_look_row(line) for line in lines)
    )


def _second_look_row(line: SecondLookResult) -> tuple[str, ...]:
    words = [MISSING_VALUE if count is None else f"{count:.0f}" for count in (line.words_once, line.words_twice)]
    return (
        line.gate,
        format_percent(line.rate),
        format_percent(line.once),
        format_percent(line.twice),
        format_points_estimate(line.difference),
        format_points(line.twice - line.random),
        format_percent(line.shown),
        *words,
    )
