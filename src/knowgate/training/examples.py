"""Training data of gates: labeled questions, whether each needs retrieval, and the split into train and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from knowgate.core.text import normalize
from knowgate.data.runs.rows import LabelRow
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.data.splits import Split, fingerprint_text, fingerprint_text_loosely, split_questions
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.stats.metrics import BoolArray
from knowgate.types import Question, Reading

Target = Literal["known", "benefit", "gain", "agree"]
OPEN_BOOK_TARGETS = ("benefit", "gain")  # targets that need answers with passages
FIT_SEPARATELY_ADVICE = "Fit them separately"
SHARED_SETTINGS = {
    "model_fingerprint": FIT_SEPARATELY_ADVICE,
    "prompts_fingerprint": FIT_SEPARATELY_ADVICE,
    "max_tokens": "Label all runs with the same number of tokens",
}
MIN_GRADED_ROWS = 40  # with fewer, the splits are too small
MIN_ROWS_PER_CLASS = 8
MIN_TRAINING_QUESTIONS_PER_CLASS = 2  # distinct questions in the training split
MIN_OPEN_BOOK_SHARE = 0.9  # share of rows with an open-book answer that is enough to learn the benefit of retrieval
NEED_CLASSES = ("questions that need retrieval", "questions that do not")
LABEL_MORE_ADVICE = "Label more questions, or use another `target`."


@dataclass(frozen=True)
class Examples:
    """Training data of a gate: labeled questions, and whether each needs retrieval.

    The same LLM answered all questions with the same prompts.

    Attributes:
        table: The label table.
        needed: For each question, whether it needs retrieval as the target defines it. This is what gates predict.
        target: When a question needs retrieval:
            `known`: if the LLM does not know the answer.
            `benefit`: if retrieval turns a wrong answer right.
            `gain`: as `benefit`, but the gate learns how probably the answers without and with passages are right, and
            ranks questions by the difference.
            `agree`: if the answers without and with passages do not agree.
        split: Indices of the train, dev, calibration and test questions.
    """

    table: LabelTable
    needed: BoolArray
    target: Target
    split: Split

    @property
    def rows(self) -> Sequence[LabelRow]:
        """The label rows."""
        return self.table.rows

    @property
    def questions(self) -> Sequence[Question]:
        """The question of each row."""
        return self.table.questions

    @property
    def readings(self) -> Sequence[Reading]:
        """The recorded signals of each row."""
        return self.table.readings

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the label runs: the LLM, its prompts, the number of answer tokens and so on."""
        return self.table.settings


def list_seen_keys(questions: Sequence[Question], split: Split, include_test: bool = False) -> list[str]:
    """List fingerprints of the questions that a gate has seen.

    Evaluations use the fingerprints to leave these questions out.

    Args:
        questions: All questions.
        split: Indices of the train, dev, calibration and test questions.
        include_test: Whether the test split was trained on, too.
    """
    seen = [*split.train, *split.dev, *split.calibration]
    if include_test:
        seen += [*split.test]
    keys = set()
    for index in seen:
        text = questions[index].text
        keys |= {fingerprint_text(text), fingerprint_text_loosely(text)}
        # Packed label runs have no texts, so their questions are recognized by the id.
        keys.add(fingerprint_text(f"id:{questions[index].id}"))
    return sorted(keys)


def load_examples(
    runs: Sequence[Path], *, target: Target | None = None, layers: Sequence[int] | None = None, seed: int = 0
) -> Examples:
    """Load label runs as the training data of a gate.

    Args:
        runs: Folders of label runs.
        target: When a question needs retrieval: `known`, `benefit`, `gain` or `agree`, as explained in `Examples`. `agree`
            needs no gold answers, but leaves out questions without an open-book answer.
            Default: `benefit` if at least 90 % of the questions have an open-book answer, else `known`.
        layers: Layers whose hidden states are read. Default: all recorded ones.
        seed: Seed of the split into train, dev, calibration and test.

    Raises:
        BadInput: There are too few rows, or too few of one class.
        BadSetting: The rows do not have the answers that the target needs.
    """
    table = load_label_table(runs, layers=layers, required_equal=SHARED_SETTINGS, graded_only=target != "agree")
    if target == "agree":
        table = _select_rows_with_both_answers(table)
    check_texts(table)
    chosen = _choose_target(table.rows, target)
    needed = np.array([_needs_retrieval(row, chosen) for row in table.rows], dtype=bool)
    _check_classes(table, needed)
    texts = [question.text for question in table.questions]
    split = split_questions(texts, seed)
    _check_distinct_questions([texts[index] for index in split.train], needed[split.train])
    return Examples(table, needed, chosen, split)


def _check_classes(table: LabelTable, needed: BoolArray) -> None:
    """Raise BadInput if there are too few questions, or too few of one class."""
    if len(needed) < MIN_GRADED_ROWS:
        raise BadInput(
            f"fitting needs at least {MIN_GRADED_ROWS} graded questions, but the label runs (recorded answers) have "
            f"{len(needed)}. Label more questions."
        )
    problem = describe_useless_answers([row.closed.text for row in table.rows if row.closed])
    require_both_classes(needed, MIN_ROWS_PER_CLASS, NEED_CLASSES, problem or LABEL_MORE_ADVICE)


def _check_distinct_questions(texts: Sequence[str], needed: BoolArray) -> None:
    """Raise BadInput if a class has too few distinct training questions for cross-validation.

    Args:
        texts: The training questions. A question may occur several times.
        needed: Whether each question needs retrieval.
    """
    distinct = np.array(list(map_questions_to_needs(texts, needed).values()), dtype=bool)
    what = ("distinct questions to train on that need retrieval", "distinct questions that do not")
    advice = "Label more distinct questions, or try another `seed`."
    require_both_classes(distinct, MIN_TRAINING_QUESTIONS_PER_CLASS, what, advice)


def check_texts(table: LabelTable) -> None:
    """Raise BadInput if the label runs were packed (stored without texts)."""
    if any(not row.question for row in table.rows):
        raise BadInput(
            "the label runs (recorded answers) were packed, which removes all texts. Fit on the original label runs instead."
        )


def map_questions_to_needs(texts: Sequence[str], needed: BoolArray) -> dict[str, bool]:
    """Map the fingerprint of each distinct question to whether the question needs retrieval.

    The first occurrence of a question counts.
    """
    needs: dict[str, bool] = {}
    for text, need in zip(texts, needed.tolist(), strict=True):
        needs.setdefault(fingerprint_text(text), need)
    return needs


def answers_agree(row: LabelRow) -> bool:
    """Return whether the normalized answers with and without passages are the same.

    Empty answers and abstentions ("I don't know") never agree.
    """
    if row.closed is None or row.open is None or RULES_ARBITER.abstains(row.closed.text):
        return False
    closed_book = normalize(row.closed.text)
    return bool(closed_book) and closed_book == normalize(row.open.text)


def _choose_target(rows: Sequence[LabelRow], target: Target | None) -> Target:
    """Return the requested target, or choose a default.

    The default is 'benefit' if nearly all rows have answers with passages, else 'known'.

    Raises:
        BadSetting: The target needs answers with passages, but too many rows have none.
    """
    n_without = sum(row.benefit is None for row in rows)
    has_benefit = len(rows) > 0 and len(rows) - n_without >= MIN_OPEN_BOOK_SHARE * len(rows)
    if target in OPEN_BOOK_TARGETS and not has_benefit:
        raise BadSetting(
            f"target='{target}' needs answers with passages, but {n_without} of {len(rows)} questions have none. Run `knowgate "
            "label` with `index`, or set target='known'."
        )
    return target or ("benefit" if has_benefit else "known")


def _select_rows_with_both_answers(table: LabelTable) -> LabelTable:
    """Select the rows with two answers, with and without passages."""
    indices = [index for index, row in enumerate(table.rows) if row.open is not None]
    if not indices:
        raise BadInput(
            "target='agree' needs answers with passages, but no question has one. Run `knowgate label` with `index`, or import "
            "both answers."
        )
    return table.subset(indices)


def _needs_retrieval(row: LabelRow, target: Target) -> bool:
    """Return whether a question needs retrieval, as the target defines it.

    `benefit` and `gain` mean: retrieval turns a wrong answer right.
    """
    if target == "agree":
        return not answers_agree(row)
    if target == "known":
        return not (row.closed and row.closed.correct)
    return row.benefit is not None and row.benefit > 0  # None: no passage was found, so retrieval does not help.


def require_both_classes(classes: BoolArray, minimum: int, what: tuple[str, str], advice: str) -> None:
    """Raise BadInput unless there are enough examples of both classes.

    Args:
        classes: The class of each example.
        minimum: Lowest number of examples of each class.
        what: Names for examples of the class True and of the class False, for the message.
        advice: What to do, for the message.
    """
    n_true, n_false = int(classes.sum()), int((~classes).sum())
    if min(n_true, n_false) < minimum:
        raise BadInput(
            f"there are {n_true} {what[0]} and {n_false} {what[1]}. Fitting needs at least {minimum} of each kind. {advice}"
        )


def describe_useless_answers(texts: Sequence[str]) -> str:
    """Return advice if all answers are empty or all decline to answer, else ""."""
    if not any(text.strip() for text in texts):
        return "Every answer is empty. Label with a larger `max_tokens`, or check the recorded answers."
    if all(RULES_ARBITER.abstains(text) for text in texts):
        return f"Every answer declines to answer ('{texts[0][:60]}'). Label with prompts that make the LLM guess."
    return ""
