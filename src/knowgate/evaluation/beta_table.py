"""CBDR's Table 3: beta by reranker by passages shown, each cell accuracy (retrieval rate), from recorded runs.

Knows label runs and gates' scores; runs no LLM and no reranker: `label --rerank` did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.display import NOTHING, Sheet, percent
from knowgate.errors import BadSetting
from knowgate.evaluation.sweeps import BETAS, sweep_betas
from knowgate.gates import GateScores, score_gates, without_seen
from knowgate.labels import passages_shown
from knowgate.runs import RunFolder, Trial, load_trial
from knowgate.statistics import Bools

ALWAYS, NEVER = "always retrieve", "never retrieve"


@dataclass(frozen=True, order=True)
class PassageChoice:
    """How a run came by its passages: the reranker (or retriever alone), by name and fingerprint, and how many."""

    ranker: str
    fingerprint: str
    shown: int  # 0 stands for all of the data's own

    @property
    def column(self) -> str:
        return f"top {self.shown}" if self.shown else "all"


@dataclass(frozen=True)
class GatedRuns:
    """The runs of one choice of passages as one trial, with the scores of each gate."""

    choice: PassageChoice
    trial: Trial
    gates: list[GateScores]


def beta_sheets(
    runs: Sequence[Path],
    gates: Sequence[str],
    *,
    plug_in: bool = False,
    drop_seen: bool = False,
    tried: Sequence[float] = BETAS,
) -> list[Sheet]:
    """A sheet for each gate. Runs whose passages were chosen in one way are one trial; of several ways, a table.

    drop_seen: leave out questions that a gate was fitted on, instead of refusing it.
    """
    trials = {choice: load_trial(some) for choice, some in by_choice(runs).items()}
    if drop_seen:
        trials = {choice: without_seen(trial, gates) for choice, trial in trials.items()}
    parts = [GatedRuns(choice, trial, score_gates(trial, gates, plug_in=plug_in)) for choice, trial in trials.items()]
    if len(parts) == 1:
        return [sweep_betas(parts[0].trial, gate, tried) for gate in parts[0].gates]
    _check_same_questions(parts)
    shared = [gate.name for gate in parts[0].gates if all(gate.name in _names(part) for part in parts)]
    return [_table(name, parts, tried) for name in shared]


def by_choice(runs: Sequence[Path]) -> dict[PassageChoice, list[Path]]:
    """The runs in the order given, put together where their passages were chosen alike."""
    found: dict[PassageChoice, list[Path]] = {}
    for run in runs:
        found.setdefault(choice_of(RunFolder(run).settings()), []).append(run)
    return found


def choice_of(settings: dict[str, Any]) -> PassageChoice:
    retriever = settings.get("retriever_fingerprint")
    shown = passages_shown(settings.get("k"), retriever) or 0
    if "reranker" in settings:
        return PassageChoice(_short(str(settings["reranker"])), str(settings["reranker_fingerprint"]), shown)
    return PassageChoice(str(settings.get("retriever", "contexts")), str(retriever), shown)


def _short(reranker: str) -> str:
    """'cross-encoder:runs/aligned' -> 'aligned'."""
    return Path(reranker.partition(":")[2] or reranker).name


def _names(part: GatedRuns) -> list[str]:
    return [gate.name for gate in part.gates]


def _check_same_questions(parts: Sequence[GatedRuns]) -> None:
    """Numbers side by side must be of the same questions."""
    first = sorted(row.id for row in parts[0].trial.rows)
    for other in parts[1:]:
        asked = sorted(row.id for row in other.trial.rows)
        if asked != first:
            raise BadSetting(
                f"the label runs {', '.join(parts[0].trial.runs)} and {', '.join(other.trial.runs)} were answered with "
                f"different passages, and on different questions ({len(first)} and {len(asked)}); a table needs the "
                "same ones: label the same data with each --rerank and --k, or sweep them one by one."
            )


def _table(gate: str, parts: Sequence[GatedRuns], tried: Sequence[float]) -> Sheet:
    """Rows: ranker and beta; columns: how many passages. The closed-book answers are the same everywhere."""
    columns = list(dict.fromkeys(part.choice.column for part in sorted(parts, key=lambda part: part.choice.shown)))
    rankers = list(dict.fromkeys((part.choice.ranker, part.choice.fingerprint) for part in parts))
    rows = [(NOTHING, NEVER, *(_first_cell(parts, column) for column in columns))]
    for ranker in rankers:
        own = {part.choice.column: part for part in parts if (part.choice.ranker, part.choice.fingerprint) == ranker}
        for name, beta in ((ALWAYS, None), *((f"{beta:g}", beta) for beta in tried)):
            rows.append((ranker[0], name, *(_cell(own.get(column), gate, beta) for column in columns)))
    title = f"{gate}: accuracy (retrieval rate) by beta, {len(parts[0].trial.rows)} questions"
    return Sheet(title, ("passages by", "answer if confidence >", *columns), tuple(rows))


def _first_cell(parts: Sequence[GatedRuns], column: str) -> str:
    trial = next(part.trial for part in parts if part.choice.column == column)
    return shown(trial, np.zeros(len(trial.rows), dtype=bool))


def _cell(part: GatedRuns | None, gate: str, beta: float | None) -> str:
    if part is None:
        return NOTHING
    scores = next(one for one in part.gates if one.name == gate)
    if beta is None:
        return shown(part.trial, np.ones(len(part.trial.rows), dtype=bool))
    return shown(part.trial, unsure(scores, beta))


def unsure(scores: GateScores, beta: float) -> Bools:
    """Where confidence is not above beta: the raw softmax of a fitted gate (CBDR, eq. 2), else 1 - need."""
    needs = scores.needs if scores.raw is None else scores.raw
    return np.asarray(needs >= 1 - beta - 1e-12)


def shown(trial: Trial, retrieve: Bools) -> str:
    """'61.7% (92.9%)': right answers, and how often was retrieved."""
    right = np.where(retrieve, trial.always_right, trial.closed_right)
    return f"{percent(float(right.mean()))} ({percent(float(retrieve.mean()))})"
