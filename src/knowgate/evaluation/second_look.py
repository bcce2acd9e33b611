"""KBM's second judgement on recorded rows (section 5.4, Figure 8): what dropping useless passages does to answers.

The judge is asked once for each run; its verdicts are kept beside the rows and read from there the next time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from knowgate.display import NOTHING, Sheet, percent, points, points_with_interval
from knowgate.errors import BadSetting
from knowgate.gates import GateScores, check_unseen, load_gate, read_artefact
from knowgate.runs import LabelRow, RecordedUse, Trial, names_of, question_of, read_use, write_use
from knowgate.statistics import Bools, Draws, Estimate, Floats, estimate, weighted_mean
from knowgate.types import SecondLook

log = logging.getLogger(__name__)
BATCH = 32


@dataclass(frozen=True)
class SecondLine:
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


def look_again(trial: Trial, folder: str) -> Bools:
    """Whether the judge in this folder finds the passages of each row of use."""
    check_unseen(trial, folder)
    judge = _judge(folder)
    found: dict[str, bool] = {}
    for run, name in zip(map(Path, trial.runs), names_of([Path(run) for run in trial.runs]), strict=True):
        rows = [row for row, key in zip(trial.rows, trial.keys, strict=True) if key == f"{name}/{row.id}"]
        found |= {f"{name}/{key}": verdict for key, verdict in judged(run, rows, folder, judge).items()}
    return np.array([found[key] for key in trial.keys], dtype=bool)


def _judge(folder: str) -> SecondLook:
    looks = load_gate(folder, plug_in=True).second_look
    if looks is None:
        raise BadSetting(f"the gate '{folder}' cannot judge passages; --second-look takes a fitted kbm gate.")
    return looks


def judged(run: Path, rows: Sequence[LabelRow], folder: str, judge: SecondLook) -> dict[str, bool]:
    """The verdicts on record, and those of rows that have none, which are then on record too."""
    made = read_artefact(folder)
    name, fingerprint = made.path.name, str(made.manifest["checksum"])
    before = [item for item in read_use(run) if (item.judge, item.fingerprint) == (name, fingerprint)]
    known = dict(before[0].useful) if before else {}
    waiting = [row for row in rows if row.id not in known]
    _check_passages(run, waiting)
    if waiting:
        log.info("%s looks at the passages of %d questions", name, len(waiting))
    for start in range(0, len(waiting), BATCH):
        part = waiting[start : start + BATCH]
        said = judge.useful([question_of(row) for row in part], [row.passages for row in part])
        known |= dict(zip((row.id for row in part), said, strict=True))
    if waiting:
        write_use(run, RecordedUse(name, fingerprint, known))
    return known


def _check_passages(run: Path, rows: Sequence[LabelRow]) -> None:
    packed = sum(row.open is not None and not (row.passages and row.question) for row in rows)
    if packed:
        raise BadSetting(
            f"'{run}' is packed without questions or passages ({packed} rows), which the second look would judge. "
            "Use the run it was made from."
        )


def second_lines(trial: Trial, gates: Sequence[GateScores], useful: Bools, draws: Draws) -> list[SecondLine]:
    """Every gate with and without the second look, between never and always."""
    if trial.open_right is None:
        raise BadSetting("--second-look drops passages, and no row has an open-book answer. Label with passages.")
    return [_line(trial, gate, useful, draws) for gate in gates]


def _line(trial: Trial, gate: GateScores, useful: Bools, draws: Draws) -> SecondLine:
    closed, opened = trial.closed_right, trial.always_right
    retrieve = gate.needs > gate.threshold
    shown = retrieve & useful
    once, twice = np.where(retrieve, opened, closed), np.where(shown, opened, closed)
    changes: Floats = twice.astype(float) - once.astype(float)
    kept = float(shown.sum() / max(1, retrieve.sum()))
    random = np.where(retrieve, kept * opened + (1 - kept) * closed, closed)
    drawn = draws.apply([lambda weights: {"gain": weighted_mean(weights, changes)}])[0]
    words = _words(trial)
    return SecondLine(
        gate.name,
        float(retrieve.mean()),
        float(once.mean()),
        float(twice.mean()),
        estimate(drawn["gain"]),
        float(random.mean()),
        float(shown.mean()),
        None if words is None else float((words * retrieve).mean()),
        None if words is None else float((words * shown).mean()),
    )


def _words(trial: Trial) -> Floats | None:
    counts = np.array([sum(len(passage.text.split()) for passage in row.passages) for row in trial.rows], dtype=float)
    return counts if counts.any() else None


def second_sheet(lines: Sequence[SecondLine]) -> Sheet:
    """Figure 8 as a table: LLM only (never), all RAG (always) and every gate, judged once and twice."""
    columns = (
        "gate", "retrieval", "accuracy, one look", "accuracy, two looks", "change", "against random drop",
        "passages shown", "words of passages", "after two looks",
    )  # fmt: skip
    return Sheet("Second look at the passages (KBM, Figure 8)", columns, tuple(_row(line) for line in lines))


def _row(line: SecondLine) -> tuple[str, ...]:
    words = [NOTHING if count is None else f"{count:.0f}" for count in (line.words_once, line.words_twice)]
    return (
        line.gate,
        percent(line.rate),
        percent(line.once),
        percent(line.twice),
        points_with_interval(line.difference),
        points(line.twice - line.random),
        percent(line.shown),
        *words,
    )
