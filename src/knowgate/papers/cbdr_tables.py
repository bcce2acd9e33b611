"""CBDR's Table 3: beta by reranker by passages shown, each cell accuracy (retrieval rate), from recorded runs.

Knows label runs and gates' scores; runs no LLM and no reranker: `label --rerank` did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.display import MISSING_VALUE, TextTable, format_percent
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.errors import BadSetting
from knowgate.gates.offline_scoring import TableScores, drop_seen_rows, score_gates
from knowgate.labels.options import count_shown_passages
from knowgate.papers.sweeps import BETAS, sweep_betas
from knowgate.stats.metrics import BoolArray

ALWAYS_RETRIEVE, NEVER_RETRIEVE = "always retrieve", "never retrieve"


@dataclass(frozen=True, order=True)
class PassageSource:
    """How a run came by its passages: the reranker (or retriever alone), by name and fingerprint, and how many."""

    ranker: str
    fingerprint: str
    shown: int  # 0 stands for all of the data's own

    @property
    def column(self) -> str:
        return f"top {self.shown}" if self.shown else "all"


@dataclass(frozen=True)
class ScoredTrial:
    """The runs of one choice of passages as one trial, with the scores of each gate."""

    choice: PassageSource
    trial: LabelTable
    gates: list[TableScores]


def build_beta_tables(
    runs: Sequence[Path],
    gates: Sequence[str],
    *,
    plug_in: bool = False,
    drop_seen: bool = False,
    tried: Sequence[float] = BETAS,
) -> list[TextTable]:
    """A sheet for each gate. Runs whose passages were chosen in one way are one trial; of several ways, a table.

    drop_seen: leave out questions that a gate was fitted on, instead of refusing it.
    """
    trials = {choice: load_label_table(some) for choice, some in group_by_passage_source(runs).items()}
    if drop_seen:
        trials = {choice: drop_seen_rows(trial, gates) for choice, trial in trials.items()}
    parts = [ScoredTrial(choice, trial, score_gates(trial, gates, plug_in=plug_in)) for choice, trial in trials.items()]
    if len(parts) == 1:
        return [sweep_betas(parts[0].trial, gate, tried) for gate in parts[0].gates]
    _check_same_questions(parts)
    shared = [gate.name for gate in parts[0].gates if all(gate.name in _names(part) for part in parts)]
    return [_table(name, parts, tried) for name in shared]


def group_by_passage_source(runs: Sequence[Path]) -> dict[PassageSource, list[Path]]:
    """The runs in the order given, put together where their passages were chosen alike."""
    found: dict[PassageSource, list[Path]] = {}
    for run in runs:
        found.setdefault(read_passage_source(RunFolder(run).settings()), []).append(run)
    return found


def read_passage_source(settings: dict[str, Any]) -> PassageSource:
    retriever = settings.get("retriever_fingerprint")
    shown = count_shown_passages(settings.get("k"), retriever) or 0
    if "reranker" in settings:
        return PassageSource(_short(str(settings["reranker"])), str(settings["reranker_fingerprint"]), shown)
    return PassageSource(str(settings.get("retriever", "contexts")), str(retriever), shown)


def _short(reranker: str) -> str:
    """'cross-encoder:runs/aligned' -> 'aligned'."""
    return Path(reranker.partition(":")[2] or reranker).name


def _names(part: ScoredTrial) -> list[str]:
    return [gate.name for gate in part.gates]


def _check_same_questions(parts: Sequence[ScoredTrial]) -> None:
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


def _table(gate: str, parts: Sequence[ScoredTrial], tried: Sequence[float]) -> TextTable:
    """Rows: ranker and beta; columns: how many passages. The closed-book answers are the same everywhere."""
    columns = list(dict.fromkeys(part.choice.column for part in sorted(parts, key=lambda part: part.choice.shown)))
    rankers = list(dict.fromkeys((part.choice.ranker, part.choice.fingerprint) for part in parts))
    rows = [(MISSING_VALUE, NEVER_RETRIEVE, *(_first_cell(parts, column) for column in columns))]
    for ranker in rankers:
        own = {part.choice.column: part for part in parts if (part.choice.ranker, part.choice.fingerprint) == ranker}
        for name, beta in ((ALWAYS_RETRIEVE, None), *((f"{beta:g}", beta) for beta in tried)):
            rows.append((ranker[0], name, *(_cell(own.get(column), gate, beta) for column in columns)))
    title = f"{gate}: accuracy (retrieval rate) by beta, {len(parts[0].trial.rows)} questions"
    return TextTable(title, ("passages by", "answer if confidence >", *columns), tuple(rows))


def _first_cell(parts: Sequence[ScoredTrial], column: str) -> str:
    trial = next(part.trial for part in parts if part.choice.column == column)
    return format_accuracy_and_rate(trial, np.zeros(len(trial.rows), dtype=bool))


def _cell(part: ScoredTrial | None, gate: str, beta: float | None) -> str:
    if part is None:
        return MISSING_VALUE
    scores = next(one for one in part.gates if one.name == gate)
    if beta is None:
        return format_accuracy_and_rate(part.trial, np.ones(len(part.trial.rows), dtype=bool))
    return format_accuracy_and_rate(part.trial, select_unsure_questions(scores, beta))


def select_unsure_questions(scores: TableScores, beta: float) -> BoolArray:
    """Where confidence is not above beta: the raw softmax of a fitted gate (CBDR, eq. 2), else 1 - need."""
    needs = scores.needs if scores.raw is None else scores.raw
    return np.asarray(needs >= 1 - beta - 1e-12)


def format_accuracy_and_rate(trial: LabelTable, retrieve: BoolArray) -> str:
    """'61.7% (92.9%)': right answers, and how often was retrieved."""
    right = np.where(retrieve, trial.always_right, trial.closed_right)
    return f"{format_percent(float(right.mean()))} ({format_percent(float(retrieve.mean()))})"
