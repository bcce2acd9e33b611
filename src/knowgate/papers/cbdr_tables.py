"""CBDR's Table 3 from label runs: accuracy (retrieval rate) by beta, reranker and number of passages.

Beta is the confidence above which the LLM answers directly, without retrieval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.display import MISSING_VALUE, TextTable, format_percent
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.records import TableScores
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.errors import BadSetting
from knowgate.gates.offline_scoring import drop_seen_rows, score_gates
from knowgate.labels.options import count_shown_passages
from knowgate.papers.sweeps import BETAS, select_unsure_questions, sweep_betas
from knowgate.stats.metrics import BoolArray


@dataclass(frozen=True, order=True)
class PassageSource:
    """How the passages of a label run were selected.

    Attributes:
        ranker: Name of the reranker, or of the retriever if there is none.
        fingerprint: Fingerprint of that reranker or retriever.
        n_shown: Number of passages shown to the LLM; 0 if the LLM saw all passages that come with the data set.
    """

    ranker: str
    fingerprint: str
    n_shown: int

    @property
    def column(self) -> str:
        """Title of the column for this number of passages."""
        return f"top {self.n_shown}" if self.n_shown else "all"


@dataclass(frozen=True)
class ScoredTable:
    """Label runs with the same passage selection, and the gates' scores on them.

    Attributes:
        source: How the passages were selected.
        table: The rows of the label runs.
        gates: Scores of each gate, by its name.
    """

    source: PassageSource
    table: LabelTable
    gates: dict[str, TableScores]


def build_beta_tables(
    runs: Sequence[Path], gates: Sequence[str], *, plug_in: bool = False, drop_seen: bool = False
) -> list[TextTable]:
    """Build one table per gate with accuracy and retrieval rate at each beta.

    If its confidence is above beta, the LLM answers without retrieval.

    Args:
        runs: Label runs. Runs whose passages were selected the same way are joined.
        gates: Gate specs and folders.
        plug_in: Allow gates that were fitted on another LLM.
        drop_seen: Leave out questions that a gate was fitted on, instead of raising an error.

    Raises:
        BadSetting: Runs with different passages have different questions.
    """
    scored = []
    for source, group in group_by_passage_source(runs).items():
        table = load_label_table(group)
        if drop_seen:
            table = drop_seen_rows(table, gates)
        scores_by_gate = {scores.gate: scores for scores in score_gates(table, gates, plug_in=plug_in)}
        scored.append(ScoredTable(source, table, scores_by_gate))
    if len(scored) == 1:
        return [sweep_betas(scored[0].table, gate) for gate in scored[0].gates.values()]
    _check_same_questions(scored)
    shared_gates = [name for name in scored[0].gates if all(name in part.gates for part in scored)]
    return [_build_beta_table(name, scored) for name in shared_gates]


def group_by_passage_source(runs: Sequence[Path]) -> dict[PassageSource, list[Path]]:
    """Group label runs by how their passages were selected."""
    groups: dict[PassageSource, list[Path]] = {}
    for run in runs:
        groups.setdefault(read_passage_source(RunFolder(run).settings()), []).append(run)
    return groups


def read_passage_source(settings: dict[str, Any]) -> PassageSource:
    """Read from a label run's settings how its passages were selected."""
    retriever = settings.get("retriever_fingerprint")  # None if the passages came with the questions
    n_shown = count_shown_passages(settings.get("k"), retriever) or 0
    if "reranker" not in settings:
        return PassageSource(str(settings.get("retriever", "contexts")), str(retriever), n_shown)
    spec = str(settings["reranker"])  # such as 'cross-encoder:runs/aligned'
    _, _, path = spec.partition(":")
    name = Path(path or spec).name  # 'aligned'
    return PassageSource(name, str(settings["reranker_fingerprint"]), n_shown)


def _check_same_questions(parts: Sequence[ScoredTable]) -> None:
    """Raise BadSetting unless all parts have the same questions."""
    first, *others = parts
    ids = sorted(row.id for row in first.table.rows)
    for other in others:
        other_ids = sorted(row.id for row in other.table.rows)
        if other_ids != ids:
            raise BadSetting(
                f"the label runs (recorded answers) {', '.join(first.table.runs)} and {', '.join(other.table.runs)} have "
                "different questions. Label the same questions in each run, or give only one run."
            )


def _build_beta_table(gate: str, parts: Sequence[ScoredTable]) -> TextTable:
    """Build the table of one gate, with a row per ranker and beta, and a column per number of passages.

    Beta is the confidence above which the LLM answers without retrieval. A cell shows accuracy and retrieval rate, such
    as '61.7 % (92.9 %)'.
    """
    columns = list(dict.fromkeys(part.source.column for part in sorted(parts, key=lambda part: part.source.n_shown)))
    # For each ranker, its label runs by column. Rankers of the same name may have different fingerprints.
    parts_by_ranker: dict[tuple[str, str], dict[str, ScoredTable]] = {}
    for part in parts:
        parts_by_ranker.setdefault((part.source.ranker, part.source.fingerprint), {})[part.source.column] = part
    # Answers without passages are the same for all rankers, so one row shows never retrieving.
    table_by_column = {part.source.column: part.table for part in reversed(parts)}
    tables = [table_by_column[column] for column in columns]
    never = [format_accuracy_and_rate(table, np.zeros(len(table.rows), dtype=bool)) for table in tables]
    rows = [(MISSING_VALUE, "never retrieve", *never)]
    for (ranker, _), part_by_column in parts_by_ranker.items():
        for beta in (None, *BETAS):  # None: always retrieve
            label = "always retrieve" if beta is None else f"{beta:g}"
            rows.append((ranker, label, *(_make_cell(part_by_column.get(column), gate, beta) for column in columns)))
    title = f"{gate}: accuracy (retrieval rate) by beta, {len(parts[0].table.rows)} questions"
    return TextTable(title, ("passages by", "answer if confidence >", *columns), tuple(rows))


def _make_cell(part: ScoredTable | None, gate: str, beta: float | None) -> str:
    """Format accuracy and retrieval rate of a gate, such as '61.7 % (92.9 %)'.

    Args:
        part: The label runs, with the scores of gates on them. If there are none (None), the cell is a dash.
        gate: Name of the gate.
        beta: The gate retrieves if its confidence is at or below this value; None to always retrieve.
    """
    if part is None:
        return MISSING_VALUE
    if beta is None:
        return format_accuracy_and_rate(part.table, np.ones(len(part.table.rows), dtype=bool))
    return format_accuracy_and_rate(part.table, select_unsure_questions(part.gates[gate], beta))


def format_accuracy_and_rate(table: LabelTable, retrieve: BoolArray) -> str:
    """Format accuracy and retrieval rate of decisions. Example: '61.7 % (92.9 %)'.

    Args:
        table: Questions that the LLM answered with and without passages. The table says of each answer whether it is
            right: `retrieved_right` with passages, `closed_book_right` without.
        retrieve: For each question, whether to retrieve. This decides which of its two answers counts.
    """
    is_right = np.where(retrieve, table.retrieved_right, table.closed_book_right)
    accuracy = format_percent(float(is_right.mean()))
    retrieval_rate = format_percent(float(retrieve.mean()))
    return f"{accuracy} ({retrieval_rate})"
