"""Training data of gates: labeled questions, whether each needs retrieval, and the split into train and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from knowgate.core.text import normalize
from knowgate.data.runs.records import name_runs
from knowgate.data.runs.rows import LabelRow
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.data.splits import Split, fingerprint_text, fingerprint_text_loosely, split_questions
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.stats.metrics import BoolArray
from knowgate.types import Question, Reading

Target = Literal["known", "benefit", "gain", "agree"]
OPEN_BOOK_TARGETS = ("benefit", "gain")  # targets that need answers with passages
ONE_GATE_ADVICE = "Fit one gate for each"
SHARED_SETTINGS = {
    "model_fingerprint": ONE_GATE_ADVICE,
    "prompts_fingerprint": ONE_GATE_ADVICE,
    "max_tokens": "Label all runs with the same number of tokens",
}
MIN_GRADED_ROWS = 40  # with fewer, the splits are too small
MIN_ROWS_PER_CLASS = 8
MIN_TRAINING_QUESTIONS_PER_CLASS = 2  # distinct questions in the training split
MIN_OPEN_BOOK_SHARE = 0.9  # share of rows with an open-book answer that is enough to learn the benefit of retrieval
LABEL_MORE_ADVICE = "Label more questions, or use another `target`."


@dataclass(frozen=True)
class Examples:
    """Training data of a gate: labeled questions, and whether each needs retrieval.

    All questions were answered by the same LLM with the same prompts.

    Attributes:
        table: The label table.
        needed: For each question, whether it needs retrieval as the target defines it. This is what gates predict.
        target: What "needs retrieval" means: `known` (the LLM does not know the answer), `benefit` (retrieval turns a
            wrong answer right), `gain` (the same, but the gate learns P(right from memory) and P(right with passages)
            and ranks by their difference) or `agree` (the answers with and without passages differ).
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

    @property
    def runs(self) -> list[str]:
        """Paths of the label runs."""
        return self.table.runs

    @cached_property
    def run_names(self) -> list[str]:
        """The name of the label run of each row."""
        names = name_runs([Path(run) for run in self.runs])
        return [names[index] if names else "" for index in self.table.run_index]

    def list_seen_keys(self, include_test: bool = False) -> list[str]:
        """List fingerprints of the questions that the gate has seen; with `include_test`, also the test split."""
        return list_seen_keys(self.questions, self.split, include_test)


def list_seen_keys(questions: Sequence[Question], split: Split, include_test: bool) -> list[str]:
    """List fingerprints of the questions that a gate has seen, so that evaluations can leave them out.

    Every question has three: of its exact text, of its normalized text and of its id. The id identifies questions in
    label runs that are packed without texts.

    Args:
        questions: All questions.
        split: Indices of the train, dev, calibration and test questions.
        include_test: Whether the test split was trained on, too.
    """
    used = np.concatenate([split.train, split.dev, split.calibration, *([split.test] if include_test else [])])
    keys = set()
    for question in (questions[index] for index in used):
        keys |= {fingerprint_text(question.text), fingerprint_text_loosely(question.text)}
        keys.add(fingerprint_text(f"id:{question.id}"))
    return sorted(keys)


def load_examples(
    runs: Sequence[Path], *, target: Target | None = None, layers: Sequence[int] | None = None, seed: int = 0
) -> Examples:
    """Load label runs as the training data of a gate.

    Args:
        runs: Folders of label runs.
        target: Which questions count as needing retrieval. `known`: the LLM does not know the answer. `benefit` and
            `gain`: retrieval turns a wrong answer right (with `gain`, a gate also ranks by the probabilities of right
            answers). `agree`: the answers with and without passages differ; this needs no gold answers and leaves out
            questions without an open-book answer.
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
    reason = _explain_default_target(table.rows, chosen) if target is None else ""
    _check_classes(needed, chosen, reason, "" if chosen in OPEN_BOOK_TARGETS else _explain_one_class(table.rows))
    texts = [question.text for question in table.questions]
    split = split_questions(texts, seed)
    _check_training_split([texts[index] for index in split.train], needed[split.train])
    return Examples(table, needed, chosen, split)


def check_texts(table: LabelTable) -> None:
    """Raise BadInput if the label runs were packed, i.e. stored without the texts of questions and answers."""
    if any(not row.question for row in table.rows):
        raise BadInput(
            "the label runs are packed and do not contain questions and answers. Fit on the original label runs instead."
        )


def map_questions_to_needs(texts: Sequence[str], needed: BoolArray) -> dict[str, bool]:
    """Map the fingerprint of each distinct question to whether it needs retrieval.

    If a question occurs several times, its first occurrence counts.
    """
    needs: dict[str, bool] = {}
    for text, need in zip(texts, needed.tolist(), strict=True):
        needs.setdefault(fingerprint_text(text), need)
    return needs


def answers_agree(row: LabelRow) -> bool:
    """Return whether the answers with and without passages are the same, ignoring case and punctuation.

    Empty answers and abstentions ("I don't know") never agree.
    """
    if row.closed is None or row.open is None or RULES_ARBITER.abstains(row.closed.text):
        return False
    closed_book = normalize(row.closed.text)
    return bool(closed_book) and closed_book == normalize(row.open.text)


def _choose_target(rows: Sequence[LabelRow], target: Target | None) -> Target:
    """Return the requested target, or the default for these rows.

    Raises:
        BadSetting: The target needs answers with passages, but too many rows have none.
    """
    default = _choose_default_target(rows)
    if target in OPEN_BOOK_TARGETS and default != "benefit":
        raise BadSetting(
            f"target='{target}' needs open-book answers (answers with passages), but {_count_without_benefit(rows)} of "
            f"{len(rows)} questions have none. Label with passages, or fit with target='known'."
        )
    return target or default


def _choose_default_target(rows: Sequence[LabelRow]) -> Target:
    """Return 'benefit' if nearly all rows have an open-book answer (with passages), else 'known'."""
    n_open_book = len(rows) - _count_without_benefit(rows)
    return "benefit" if rows and n_open_book >= MIN_OPEN_BOOK_SHARE * len(rows) else "known"


def _count_without_benefit(rows: Sequence[LabelRow]) -> int:
    """Count the rows for which it is not known whether retrieval helps, as they have no open-book answer."""
    return sum(row.benefit is None for row in rows)


def _select_rows_with_both_answers(table: LabelTable) -> LabelTable:
    """Select the rows that have an answer with and one without passages."""
    indices = [index for index, row in enumerate(table.rows) if row.open is not None]
    if not indices:
        raise BadInput(
            "target='agree' compares answers with and without passages, but no question has an answer with passages. "
            "Label with an index, or import both answers."
        )
    return table.subset(indices)


def _needs_retrieval(row: LabelRow, target: Target) -> bool:
    """Return whether a question needs retrieval by the definition of the target.

    `agree`: the answers with and without passages differ. `known`: the answer without passages is wrong. `benefit` and
    `gain`: retrieval turns a wrong answer right.
    """
    if target == "agree":
        return not answers_agree(row)
    if target == "known":
        return not (row.closed and row.closed.correct)
    return row.benefit is not None and row.benefit > 0  # None: no passage was found, so retrieval does not help.


def _explain_default_target(rows: Sequence[LabelRow], target: Target) -> str:
    """Return why this target is the default for these rows, in parentheses, to be inserted into an error message."""
    if target == "benefit":
        return " ('benefit' was chosen because the rows have open-book answers)"
    without = _count_without_benefit(rows)
    return f" ('known' was chosen because {without} of {len(rows)} rows have no open-book answer)"


def _check_classes(needed: BoolArray, target: Target, target_reason: str, cause: str) -> None:
    """Raise BadInput if there are too few questions in total, or too few of one class.

    Args:
        needed: Whether each question needs retrieval; this is the class.
        target: What the gate learns.
        target_reason: Says in the message why that target was chosen; '' if the user chose it.
        cause: Says in the message why one class is rare, such as that all answers are empty; '' if that is unknown.
    """
    if len(needed) < MIN_GRADED_ROWS:
        raise BadInput(
            f"fitting needs at least {MIN_GRADED_ROWS} graded questions, but the label runs have {len(needed)}. Label "
            "more questions."
        )
    positive, negative = int(needed.sum()), int((~needed).sum())
    if min(positive, negative) < MIN_ROWS_PER_CLASS:
        raise BadInput(
            f"fitting with target='{target}'{target_reason} needs {MIN_ROWS_PER_CLASS} questions of each class, but the "
            f"label runs have {positive} that need retrieval and {negative} that do not. {cause or LABEL_MORE_ADVICE}"
        )


def _explain_one_class(rows: Sequence[LabelRow]) -> str:
    """Explain why all answers from memory were graded alike; '' if more questions may change that.

    The causes found here (all answers are empty, or all abstain) do not go away with more questions.
    """
    texts = [row.closed.text for row in rows if row.closed]
    if not any(text.strip() for text in texts):
        return "Every answer from memory is empty. Label with a larger `max_tokens`, or check the recorded answers."
    if all(RULES_ARBITER.abstains(text) for text in texts):
        advice = "Label with prompts that make the LLM guess."
        return f"Every answer from memory declines to answer ('{texts[0][:60]}'). {advice}"
    return ""


def _check_training_split(texts: Sequence[str], needed: BoolArray) -> None:
    """Raise BadInput unless the training split has two distinct questions of each class.

    Training in folds holds out one of them and needs another one to learn from.
    """
    classes = list(map_questions_to_needs(texts, needed).values())
    positive, negative = classes.count(True), classes.count(False)
    if min(positive, negative) < MIN_TRAINING_QUESTIONS_PER_CLASS:
        raise BadInput(
            f"the training split has {positive} distinct questions that need retrieval and {negative} that do not, but "
            f"fitting needs at least {MIN_TRAINING_QUESTIONS_PER_CLASS} of each. Label more distinct questions, or try "
            "another `seed`."
        )
