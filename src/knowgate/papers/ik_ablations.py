"""Ablations of IK (section 4 of the paper): number of draft tokens, number of training questions, and grader.

For each variant a judge is fitted: a model that reads a question and the first T tokens of the LLM's draft answer, and
predicts whether the LLM knows the answer. All judges are tested on the same questions, with the grades of the label
runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.display import MISSING_VALUE, TextTable, format_percent
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.errors import BadInput
from knowgate.gates import load_fitted_gate
from knowgate.gates.artifacts.gate_folder import is_artifact
from knowgate.gates.fitted_gate import RAW_THRESHOLD
from knowgate.gates.offline_scoring import score_gate
from knowgate.labels.grading import load_grader
from knowgate.papers.sweeps import format_auroc, measure_decisions, measure_majority_decisions
from knowgate.stats.metrics import BoolArray
from knowgate.training.examples import MIN_ROWS_PER_CLASS, Examples, load_examples
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges.ik import fit_ik, limit_training_rows
from knowgate.types import Model

DRAFT_TOKENS = (0, 8, 32, 128)  # T in the paper
ABLATION_COLUMNS = (
    "T", "training rows", "labels by", "judged right", "own verdict right", "AUROC", "accuracy (retrieval)", "random",
)  # fmt: skip


@dataclass(frozen=True)
class IkVariant:
    """Settings of one judge (it predicts whether the LLM knows an answer).

    Attributes:
        tokens: Number of draft tokens that the judge reads.
        rows: Maximum number of training rows; None for all.
        grader: Grader whose verdicts the judge learns.
    """

    tokens: int
    rows: int | None
    grader: str

    @property
    def name(self) -> str:
        """Folder name of the judge."""
        return f"ik-t{self.tokens}-n{self.rows or 'all'}-{self.grader}"


@dataclass(frozen=True)
class IkAblations:
    """Settings of the ablations, one judge per combination of `tokens`, `rows` and `graders`.

    A judge predicts from question and draft whether the LLM knows the answer.

    Attributes:
        tokens: Numbers of draft tokens.
        rows: Maximum numbers of training rows; None for all.
        graders: Graders whose verdicts the judge learns: 'exact', 'contains' or 'judge'. Empty for the grader of the
            label runs.
        judge: LLM that grades if 'judge' is among the graders but did not grade the label runs.
        fit_options: Other options of `fit ik`.
        seed: Seed of splits and training.
    """

    tokens: Sequence[int] = DRAFT_TOKENS
    rows: Sequence[int | None] = (None,)
    graders: Sequence[str] = ()
    judge: Model | None = None
    fit_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


def sweep_ik(
    runs: Sequence[Path],
    ablations: IkAblations,
    *,
    test_runs: Sequence[Path] = (),
    out: Path | None = None,
    notify: Callable[[str], None] = lambda message: None,
) -> TextTable:
    """Fit a judge for each variant and tabulate its results on the test questions.

    The last row is a baseline (majority).

    Args:
        runs: Label runs to fit on.
        ablations: Variants to fit.
        test_runs: Label runs to test on. By default the test split of `runs`.
        out: Folder to store the judges in. Judges found there are not fitted again. By default they are not kept.
        notify: Called with a message before each fit.
    """
    examples = load_examples(list(runs), target="known", layers=(), seed=ablations.seed)
    test = load_label_table(list(test_runs), layers=()) if test_runs else examples.table.subset(examples.split.test)
    own_grader = str(examples.settings["grader"])
    graders = ablations.graders or (own_grader,)
    # For each grader, which questions need retrieval: those whose answer without passages it grades as wrong.
    needed = {grader: compute_needed(examples, grader, ablations.judge) for grader in graders}
    rows = []
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for tokens, n_rows, grader in product(ablations.tokens, ablations.rows, graders):
            variant = IkVariant(tokens, n_rows, grader)
            training = limit_training_rows(replace(examples, needed=needed[grader]), n_rows, ablations.seed)
            gate = _fit_variant(training, variant, folder, ablations, notify)
            rows.append(_make_row(test, variant, gate, len(training.split.train)))
    rows.append(_make_majority_row(test))
    title = f"IK on {len(test.rows)} questions, graded by {own_grader}"
    return TextTable(title, ABLATION_COLUMNS, tuple(rows))


def _make_majority_row(test: LabelTable) -> tuple[str, ...]:
    """Make the table row of the baseline that decides the same for all questions."""
    cells = measure_majority_decisions(test)
    cells["T"] = "majority"  # the first column names the row
    cells["own verdict right"] = cells["judged right"]  # the baseline has no threshold, so its verdict is its decision
    cells["accuracy (retrieval)"] = f"{cells['accuracy']} ({cells['retrieval']})"
    return tuple(cells.get(column, MISSING_VALUE) for column in ABLATION_COLUMNS)


def _fit_variant(
    examples: Examples, variant: IkVariant, folder: Path, ablations: IkAblations, notify: Callable[[str], None]
) -> Path:
    """Fit the judge of a variant and return its folder. An existing judge is kept."""
    out = folder / variant.name
    if is_artifact(out):
        notify(f"{variant.name} is already fitted")
        return out
    notify(f"fitting {variant.name} on {len(examples.split.train)} questions")
    work = folder / "training" / variant.name
    fitted = fit_ik(examples, tokens=variant.tokens, seed=ablations.seed, work=work, **ablations.fit_options)
    save_fitted(fitted, examples, out)
    return out


def _make_row(table: LabelTable, variant: IkVariant, folder: Path, n_training: int) -> tuple[str, ...]:
    """Measure a fitted judge on test questions, and format the results as a table row.

    Args:
        table: The test questions.
        variant: Settings of the judge.
        folder: Folder of the judge.
        n_training: Number of questions that it was fitted on.
    """
    scores = score_gate(table, load_fitted_gate(str(folder)))
    cells = measure_decisions(table, scores.needs > scores.threshold)
    # The paper's accuracy: how often the judge's uncalibrated Yes or No is right.
    raw_accuracy = MISSING_VALUE
    if scores.raw is not None:
        says_unknown = scores.raw > RAW_THRESHOLD
        raw_accuracy = format_percent(float((says_unknown == ~table.closed_book_right).mean()))
    answers = f"{cells['accuracy']} ({cells['retrieval']})"
    return (
        str(variant.tokens), str(n_training), variant.grader, cells["judged right"], raw_accuracy,
        format_auroc(table, scores), answers, cells["random"],
    )  # fmt: skip


def compute_needed(examples: Examples, grader: str, judge: Model | None) -> BoolArray:
    """Return for each question whether the answer without passages is wrong.

    If the grader has graded the label runs, its stored verdicts are used. Otherwise it grades the answers now.

    Raises:
        UnknownName: The grader is unknown, or it is 'judge' and no LLM is given.
        BadInput: Too few questions are answered right, or too few are answered wrong.
    """
    own_grader = str(examples.settings["grader"])
    if grader == own_grader or (grader == "judge" and own_grader.startswith("judge")):
        return examples.needed
    texts = [row.closed.text if row.closed else "" for row in examples.rows]
    verdicts = load_grader(grader, judge).grade(texts, examples.questions)
    needed = np.array([not verdict.correct for verdict in verdicts], dtype=bool)
    n_unknown = int(needed.sum())
    n_known = len(needed) - n_unknown
    if min(n_unknown, n_known) < MIN_ROWS_PER_CLASS:
        counts = f"the grader '{grader}' grades {n_known} answers right and {n_unknown} wrong"
        raise BadInput(
            f"{counts}. At least {MIN_ROWS_PER_CLASS} questions of each of these kinds are needed. Label more "
            "questions."
        )
    return needed
