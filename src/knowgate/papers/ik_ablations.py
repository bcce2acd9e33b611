"""IK's ablations (the IK paper, section 4): draft tokens T, training size, and who made the labels.

A judge is fitted for each. All are tested on the same questions against the same verdicts, those of the runs' grader.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.display import MISSING_VALUE, TextTable, format_percent
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.errors import BadInput, BadSetting
from knowgate.gates import load_fitted_gate
from knowgate.gates.artifacts.gate_folder import is_artifact
from knowgate.gates.fitted_gate import RAW_THRESHOLD
from knowgate.gates.offline_scoring import TableScores, score_gate
from knowgate.labels.grading import load_grader
from knowgate.papers.sweeps import build_majority_row, build_threshold_row, format_auroc
from knowgate.stats.metrics import BoolArray
from knowgate.training.examples import MIN_ROWS_PER_CLASS, Examples, load_examples
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges.ik import fit_ik, limit_training_rows
from knowgate.types import Model

DRAFT_TOKENS = (0, 8, 32, 128)
JUDGE_GRADER, STRING_GRADERS = "judge", ("exact", "contains")
ABLATION_COLUMNS = (
    "T", "training rows", "labels by", "judged right", "own verdict right", "AUROC", "accuracy (retrieval)", "random",
)  # fmt: skip


@dataclass(frozen=True)
class IkVariant:
    """One judge of the sweep. rows: None for all there are."""

    tokens: int
    rows: int | None
    grade: str

    @property
    def name(self) -> str:
        return f"ik-t{self.tokens}-n{self.rows or 'all'}-{self.grade}"


def sweep_ik(
    runs: Sequence[Path],
    *,
    test: Sequence[Path] = (),
    tokens: Sequence[int] = DRAFT_TOKENS,
    rows: Sequence[int | None] = (None,),
    grades: Sequence[str] = (),
    judge: Model | None = None,
    out: Path | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> TextTable:
    """A table with a line for each variant, and the majority verdict beside them.

    test: other runs to test on; by default the test split of `runs`. grades: whose verdicts the judge learns, exact,
    contains (by the texts of the rows) or judge (as recorded, or by the LLM `judge`); by default the runs' own.
    out: where the judges are kept; those that are there already are not fitted again. options: of `fit ik`.
    """
    examples = load_examples(list(runs), target="known", layers=(), seed=seed)
    tested = load_label_table(list(test), layers=()) if test else examples.table.subset(examples.split.test)
    own = str(examples.settings["grader"])
    needed = {grade: compute_needed(examples, grade, judge) for grade in grades or (own,)}
    variants = [IkVariant(*picked) for picked in product(tokens, rows, needed)]
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lines = []
        for variant in variants:
            taught = limit_training_rows(replace(examples, needed=needed[variant.grade]), variant.rows, seed)
            lines.append(_line(tested, variant, _fitted(taught, variant, folder, seed, say, options), taught))
    title = f"IK on {len(tested.rows)} questions, told right by the verdicts of {own}"
    return TextTable(title, ABLATION_COLUMNS, (*lines, _majority(tested)))


def _fitted(
    examples: Examples, variant: IkVariant, folder: Path, seed: int, say: Callable[[str], None], options: dict[str, Any]
) -> Path:
    out = folder / variant.name
    if is_artifact(out):
        say(f"{variant.name} is there already")
        return out
    say(f"fitting {variant.name} on {len(examples.split.train)} questions")
    fitted = fit_ik(examples, tokens=variant.tokens, seed=seed, work=folder / "training" / variant.name, **options)
    save_fitted(fitted, examples, out)
    return out


def _line(trial: LabelTable, variant: IkVariant, folder: Path, examples: Examples) -> tuple[str, ...]:
    scored = score_gate(trial, load_fitted_gate(str(folder)))
    _, rate, accuracy, random, *_, judged = build_threshold_row(trial, scored, scored.threshold, "")
    return (
        str(variant.tokens), str(len(examples.split.train)), variant.grade, judged, _own(trial, scored),
        format_auroc(trial, scored), f"{accuracy} ({rate})", random,
    )  # fmt: skip


def _own(trial: LabelTable, scored: TableScores) -> str:
    """How often the raw Yes or No is right: the paper's accuracy of the task."""
    if scored.raw is None:
        return MISSING_VALUE
    return format_percent(float(((scored.raw > RAW_THRESHOLD) == ~trial.closed_right).mean()))


def _majority(trial: LabelTable) -> tuple[str, ...]:
    _, rate, accuracy, random, *_, judged = build_majority_row(trial)
    return ("majority", MISSING_VALUE, MISSING_VALUE, judged, judged, MISSING_VALUE, f"{accuracy} ({rate})", random)


def compute_needed(examples: Examples, grade: str, judge: Model | None) -> BoolArray:
    """Which questions need retrieval, by the verdicts of one grader over the closed-book answers."""
    own = str(examples.settings["grader"])
    if grade == own or (grade == JUDGE_GRADER and own.startswith(JUDGE_GRADER)):
        return examples.needed
    if grade == JUDGE_GRADER and judge is None:
        raise BadSetting(
            f"the label runs are graded by '{own}'. For the verdicts of a judge give one, --judge MODEL, or label with "
            "--grade judge --judge MODEL."
        )
    if grade not in (*STRING_GRADERS, JUDGE_GRADER):
        raise BadSetting(f"--grades names '{grade}'; allowed: {', '.join((*STRING_GRADERS, JUDGE_GRADER))}.")
    texts = [row.closed.text if row.closed else "" for row in examples.rows]
    verdicts = load_grader(grade, judge).grade(texts, examples.questions)
    needed = np.array([not verdict.correct for verdict in verdicts], dtype=bool)
    if min(needed.sum(), (~needed).sum()) < MIN_ROWS_PER_CLASS:
        raise BadInput(
            f"by '{grade}' {int((~needed).sum())} questions are known and {int(needed.sum())} unknown: a judge learns "
            f"from {MIN_ROWS_PER_CLASS} of each at least. Label more questions, or leave '{grade}' out of --grades."
        )
    return needed
