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

from knowgate.display import NOTHING, Sheet, percent
from knowgate.errors import BadInput, BadSetting
from knowgate.evaluation.sweeps import auroc_shown, line_at, majority_line
from knowgate.fitting import FEWEST_OF_A_KIND, Examples, fewer, fit_ik, load_examples, save_fitted
from knowgate.gates import MIDDLE, GateScores, is_artefact, load_fitted, score_gate
from knowgate.labels import load_grader
from knowgate.runs import Trial, load_trial
from knowgate.statistics import Bools
from knowgate.types import Model

TOKENS = (0, 8, 32, 128)
JUDGE, STRINGS = "judge", ("exact", "contains")
COLUMNS = (
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
    tokens: Sequence[int] = TOKENS,
    rows: Sequence[int | None] = (None,),
    grades: Sequence[str] = (),
    judge: Model | None = None,
    out: Path | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> Sheet:
    """A table with a line for each variant, and the majority verdict beside them.

    test: other runs to test on; by default the test split of `runs`. grades: whose verdicts the judge learns, exact,
    contains (by the texts of the rows) or judge (as recorded, or by the LLM `judge`); by default the runs' own.
    out: where the judges are kept; those that are there already are not fitted again. options: of `fit ik`.
    """
    examples = load_examples(list(runs), target="known", layers=(), seed=seed)
    tested = load_trial(list(test), layers=()) if test else examples.trial.subset(examples.split.test)
    own = str(examples.settings["grader"])
    needed = {grade: needed_by(examples, grade, judge) for grade in grades or (own,)}
    variants = [IkVariant(*picked) for picked in product(tokens, rows, needed)]
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lines = []
        for variant in variants:
            taught = fewer(replace(examples, needed=needed[variant.grade]), variant.rows, seed)
            lines.append(_line(tested, variant, _fitted(taught, variant, folder, seed, say, options), taught))
    title = f"IK on {len(tested.rows)} questions, told right by the verdicts of {own}"
    return Sheet(title, COLUMNS, (*lines, _majority(tested)))


def _fitted(
    examples: Examples, variant: IkVariant, folder: Path, seed: int, say: Callable[[str], None], options: dict[str, Any]
) -> Path:
    out = folder / variant.name
    if is_artefact(out):
        say(f"{variant.name} is there already")
        return out
    say(f"fitting {variant.name} on {len(examples.split.train)} questions")
    fitted = fit_ik(examples, tokens=variant.tokens, seed=seed, work=folder / "training" / variant.name, **options)
    save_fitted(fitted, examples, out)
    return out


def _line(trial: Trial, variant: IkVariant, folder: Path, examples: Examples) -> tuple[str, ...]:
    scored = score_gate(trial, load_fitted(str(folder)))
    _, rate, accuracy, random, *_, judged = line_at(trial, scored, scored.threshold, "")
    return (
        str(variant.tokens), str(len(examples.split.train)), variant.grade, judged, _own(trial, scored),
        auroc_shown(trial, scored), f"{accuracy} ({rate})", random,
    )  # fmt: skip


def _own(trial: Trial, scored: GateScores) -> str:
    """How often the raw Yes or No is right: the paper's accuracy of the task."""
    if scored.raw is None:
        return NOTHING
    return percent(float(((scored.raw > MIDDLE) == ~trial.closed_right).mean()))


def _majority(trial: Trial) -> tuple[str, ...]:
    _, rate, accuracy, random, *_, judged = majority_line(trial)
    return ("majority", NOTHING, NOTHING, judged, judged, NOTHING, f"{accuracy} ({rate})", random)


def needed_by(examples: Examples, grade: str, judge: Model | None) -> Bools:
    """Which questions need retrieval, by the verdicts of one grader over the closed-book answers."""
    own = str(examples.settings["grader"])
    if grade == own or (grade == JUDGE and own.startswith(JUDGE)):
        return examples.needed
    if grade == JUDGE and judge is None:
        raise BadSetting(
            f"the label runs are graded by '{own}'. For the verdicts of a judge give one, --judge MODEL, or label with "
            "--grade judge --judge MODEL."
        )
    if grade not in (*STRINGS, JUDGE):
        raise BadSetting(f"--grades names '{grade}'; allowed: {', '.join((*STRINGS, JUDGE))}.")
    texts = [row.closed.text if row.closed else "" for row in examples.rows]
    verdicts = load_grader(grade, judge).grade(texts, examples.questions)
    needed = np.array([not verdict.correct for verdict in verdicts], dtype=bool)
    if min(needed.sum(), (~needed).sum()) < FEWEST_OF_A_KIND:
        raise BadInput(
            f"by '{grade}' {int((~needed).sum())} questions are known and {int(needed.sum())} unknown: a judge learns "
            f"from {FEWEST_OF_A_KIND} of each at least. Label more questions, or leave '{grade}' out of --grades."
        )
    return needed
