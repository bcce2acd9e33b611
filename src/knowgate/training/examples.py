"""Label runs to training data: a trial with what each question should be told, and disjoint splits by question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from knowgate.core.text import normalize
from knowgate.data.runs.rows import LabelRow
from knowgate.data.runs.table import LabelTable, load_label_table, name_runs
from knowgate.data.splits import Split, fingerprint_text, fingerprint_text_loosely, split_questions
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.types import Question, Reading

Target = Literal["known", "benefit", "agree"]
ONE_GATE_ADVICE = "fit one gate for each"
SHARED_SETTINGS = {
    "model_fingerprint": ONE_GATE_ADVICE,
    "prompts_fingerprint": ONE_GATE_ADVICE,
    "max_tokens": "label with one --max-tokens",
}
MIN_GRADED_ROWS = 40  # graded rows, below which splits are too small to mean anything
MIN_ROWS_PER_CLASS = 8
LABEL_MORE_ADVICE = "Label more questions, or use the other --target."
MIN_OPEN_BOOK_SHARE = 0.9  # share of rows with an open-book answer from which on the effect of retrieval can be learnt
MIN_TRAINING_QUESTIONS_PER_CLASS = 2  # different questions of each kind in the training split


@dataclass(frozen=True)
class Examples:
    """Graded questions of one model under one wording, with what they should be told: True = needs retrieval.

    balanced: label runs of different size count the same in losses and calibration, see `weights`.
    """

    trial: LabelTable
    needed: BoolArray
    target: Target
    split: Split
    balanced: bool = False

    @property
    def rows(self) -> Sequence[LabelRow]:
        return self.trial.rows

    @property
    def questions(self) -> Sequence[Question]:
        return self.trial.questions

    @property
    def readings(self) -> Sequence[Reading]:
        return self.trial.readings

    @property
    def settings(self) -> dict[str, Any]:
        return self.trial.settings

    @property
    def runs(self) -> list[str]:
        return self.trial.runs

    @cached_property
    def sets(self) -> list[str]:
        """The label run each row is of, by its name."""
        names = name_runs([Path(run) for run in self.runs])
        return [names[index] if names else "" for index in self.trial.run_index]

    @cached_property
    def weights(self) -> FloatArray | None:
        """How much each row counts, 1 on average: every set as much as any other. None where all count the same."""
        if not self.balanced:
            return None
        sizes = Counter(self.sets)
        return np.array([len(self.sets) / (len(sizes) * sizes[name]) for name in self.sets])

    def weights_of(self, places: NDArray[np.int64]) -> FloatArray | None:
        return None if self.weights is None else self.weights[places]

    def seen(self, everything: bool = False) -> list[str]:
        """Fingerprints of the questions that fitting looked at: all, or those that were not held out for the test."""
        split = self.split
        used = np.concatenate([split.train, split.dev, split.calibration, *([split.test] if everything else [])])
        return list_question_keys([self.questions[number] for number in used])


def list_question_keys(questions: Sequence[Question]) -> list[str]:
    """By text, whole and loosely, and by id for rows that were packed without their texts."""
    keys = (
        (fingerprint_text(one.text), fingerprint_text_loosely(one.text), fingerprint_text(f"id:{one.id}"))
        for one in questions
    )
    return sorted({key for each in keys for key in each})


def load_examples(
    runs: Sequence[Path],
    *,
    target: Target | None = None,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    balanced: bool = False,
) -> Examples:
    """Everything a fit needs from label runs. `target` is benefit where open-book answers exist, unless given; for
    agree no answer needs a grade, and rows without an open-book answer are left out."""
    trial = load_label_table(runs, layers=layers, required_equal=SHARED_SETTINGS, graded_only=target != "agree")
    trial = _answered_twice(trial) if target == "agree" else trial
    if any(not row.question for row in trial.rows):
        raise BadInput("the label runs are packed without their questions; fit on the runs they were made from.")
    chosen = _chosen_target(trial.rows, target)
    needed = np.array([_needed(row, chosen) for row in trial.rows], dtype=bool)
    because = _because(trial.rows, chosen) if target is None else ""
    _check_enough(needed, chosen, because, "" if chosen == "benefit" else _one_sided(trial.rows))
    texts = [question.text for question in trial.questions]
    split = split_questions(texts, seed)
    _check_train([texts[number] for number in split.train], needed[split.train])
    return Examples(trial, needed, chosen, split, balanced)


def map_questions_to_needs(texts: Sequence[str], needed: BoolArray) -> dict[str, bool]:
    """Each different question by its fingerprint, with whether it needs retrieval the first time it is there."""
    first: dict[str, bool] = {}
    for text, need in zip(texts, needed.tolist(), strict=True):
        first.setdefault(fingerprint_text(text), need)
    return first


def _chosen_target(rows: Sequence[LabelRow], wanted: Target | None) -> Target:
    usual = _usual_target(rows)
    if wanted == "benefit" and usual != "benefit":
        without = sum(row.benefit is None for row in rows)
        raise BadSetting(
            f"{without} of {len(rows)} rows have no open-book answer: label with passages (import-answers --open KEY), "
            "or fit a gate on --target known, such as judge."
        )
    return wanted or usual


def _usual_target(rows: Sequence[LabelRow]) -> Target:
    """Benefit where nearly every question has an open-book answer; the others found nothing to read."""
    opened = sum(row.benefit is not None for row in rows)
    return "benefit" if rows and opened >= MIN_OPEN_BOOK_SHARE * len(rows) else "known"


def _answered_twice(trial: LabelTable) -> LabelTable:
    """The rows with both answers."""
    places = [place for place, row in enumerate(trial.rows) if row.open is not None]
    if not places:
        raise BadInput(
            "fitting on 'agree' compares the closed-book with the open-book answer, and no row has the latter. Label "
            "with passages (knowgate label --index DIR), or import both (knowgate import-answers --closed A --open B)."
        )
    return trial.subset(places)


def answers_agree(row: LabelRow) -> bool:
    """Whether both answers are one; no answer, or that the LLM cannot tell, is none to agree on."""
    if row.closed is None or row.open is None or RULES_ARBITER.abstains(row.closed.text):
        return False
    closed = normalize(row.closed.text)
    return bool(closed) and closed == normalize(row.open.text)


def _needed(row: LabelRow, target: Target) -> bool:
    if target == "agree":
        return not answers_agree(row)
    if target == "known":
        return not (row.closed and row.closed.correct)
    return row.benefit is not None and row.benefit > 0  # where nothing was found retrieving does not help


def _because(rows: Sequence[LabelRow], target: Target) -> str:
    """Why this target, which nobody asked for, in brackets."""
    if target == "benefit":
        return " ('benefit' was chosen because the rows have open-book answers)"
    without = sum(row.benefit is None for row in rows)
    return f" ('known' was chosen because {without} of {len(rows)} rows have no open-book answer)"


def _check_enough(needed: BoolArray, target: Target, because: str, cause: str) -> None:
    if len(needed) < MIN_GRADED_ROWS:
        raise BadInput(
            f"fitting needs at least {MIN_GRADED_ROWS} graded rows; the label runs have {len(needed)}. Label more."
        )
    yes, no = int(needed.sum()), int((~needed).sum())
    if min(yes, no) < MIN_ROWS_PER_CLASS:
        raise BadInput(
            f"fitting on '{target}' needs {MIN_ROWS_PER_CLASS} questions of each kind{because}; the label runs "
            f"have {yes} that need retrieval and {no} that do not. {cause or LABEL_MORE_ADVICE}"
        )


def _one_sided(rows: Sequence[LabelRow]) -> str:
    """Why all answers from memory were graded alike, where more questions would not help; '' where they might."""
    texts = [row.closed.text for row in rows if row.closed]
    if not any(text.strip() for text in texts):
        return "Every answer from memory is empty: label with a larger --max-tokens, or look at what was recorded."
    if all(RULES_ARBITER.abstains(text) for text in texts):
        said = f"Every answer from memory says that it cannot tell ('{texts[0][:60]}')"
        return f"{said}: label with prompts that make the LLM guess."
    return ""


def _check_train(texts: Sequence[str], needed: BoolArray) -> None:
    """Two questions of each kind: one may be put aside and there is still something to tell apart."""
    kinds = list(map_questions_to_needs(texts, needed).values())
    yes, no = kinds.count(True), kinds.count(False)
    if min(yes, no) < MIN_TRAINING_QUESTIONS_PER_CLASS:
        raise BadInput(
            f"the training split has {yes} different questions that need retrieval and {no} that do not; fitting takes "
            f"{MIN_TRAINING_QUESTIONS_PER_CLASS} of each. Label more different questions, or try another --seed."
        )
