"""Training data of gates: a label table with the target of each question, split by question."""

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
    "max_tokens": "label all runs with the same number of tokens",
}
MIN_GRADED_ROWS = 40  # with fewer, the splits are too small
MIN_ROWS_PER_CLASS = 8
MIN_TRAINING_QUESTIONS_PER_CLASS = 2  # distinct questions in the training split
MIN_OPEN_BOOK_SHARE = 0.9  # share of rows with an open-book answer that is enough to learn the benefit of retrieval
LABEL_MORE_ADVICE = "Label more questions, or use another `target`."


@dataclass(frozen=True)
class Examples:
    """Graded questions of one model and prompt, with the class to predict.

    Attributes:
        table: The label table.
        needed: True where the question needs retrieval, by the target.
        target: What "needs retrieval" means: `known` (the LLM does not know the answer), `benefit` (retrieval turns a
            wrong answer right) or `agree` (the answers with and without passages differ).
        split: Indices of the train, dev, calibration and test questions.
        balanced: Give every label run the same total weight, see `weights`.
    """

    table: LabelTable
    needed: BoolArray
    target: Target
    split: Split
    balanced: bool = False

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
        """Settings that all label runs share."""
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

    @cached_property
    def weights(self) -> FloatArray | None:
        """Weight of each row, 1 on average, so that every run counts the same; None if all rows count the same."""
        if not self.balanced:
            return None
        sizes = Counter(self.run_names)
        return np.array([len(self.run_names) / (len(sizes) * sizes[name]) for name in self.run_names])

    def select_weights(self, indices: NDArray[np.int64]) -> FloatArray | None:
        """Return the weights of some rows; None if all rows count the same."""
        return None if self.weights is None else self.weights[indices]

    def list_seen_keys(self, include_test: bool = False) -> list[str]:
        """List fingerprints of the questions used in fitting; with `include_test`, also of the test split."""
        return list_seen_keys(self.questions, self.split, include_test)


def list_seen_keys(questions: Sequence[Question], split: Split, include_test: bool) -> list[str]:
    """List fingerprints of the questions used in fitting: by exact text, by normalized text and by id.

    The id identifies questions in runs that are packed without their texts.
    """
    used = np.concatenate([split.train, split.dev, split.calibration, *([split.test] if include_test else [])])
    keys = set()
    for question in (questions[index] for index in used):
        keys |= {fingerprint_text(question.text), fingerprint_text_loosely(question.text)}
        keys.add(fingerprint_text(f"id:{question.id}"))
    return sorted(keys)


def load_examples(
    runs: Sequence[Path],
    *,
    target: Target | None = None,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    balanced: bool = False,
) -> Examples:
    """Load label runs as training data.

    Args:
        runs: Folders of label runs.
        target: What to predict. Default: `benefit` if nearly all rows have open-book answers, else `known`. For
            `agree` no grade is needed; rows without an open-book answer are left out.
        layers: Layers whose hidden states are read. Default: all recorded ones.
        seed: Seed of the split.
        balanced: Give every label run the same total weight.

    Raises:
        BadInput: There are too few rows, or too few of one class.
        BadSetting: The rows do not have the answers that the target needs.
    """
    table = load_label_table(runs, layers=layers, required_equal=SHARED_SETTINGS, graded_only=target != "agree")
    if target == "agree":
        table = _select_rows_with_both_answers(table)
    if any(not row.question for row in table.rows):
        raise BadInput("the label runs are packed without their questions; fit on the runs they were made from.")
    chosen = _choose_target(table.rows, target)
    needed = np.array([_needs_retrieval(row, chosen) for row in table.rows], dtype=bool)
    reason = _explain_default_target(table.rows, chosen) if target is None else ""
    _check_classes(needed, chosen, reason, "" if chosen == "benefit" else _explain_one_class(table.rows))
    texts = [question.text for question in table.questions]
    split = split_questions(texts, seed)
    _check_training_split([texts[index] for index in split.train], needed[split.train])
    return Examples(table, needed, chosen, split, balanced)


def map_questions_to_needs(texts: Sequence[str], needed: BoolArray) -> dict[str, bool]:
    """Map the fingerprint of each distinct question to its class; of repeated questions the first one counts."""
    needs: dict[str, bool] = {}
    for text, need in zip(texts, needed.tolist(), strict=True):
        needs.setdefault(fingerprint_text(text), need)
    return needs


def answers_agree(row: LabelRow) -> bool:
    """Return whether closed-book and open-book answer are the same; empty answers and abstentions never agree."""
    if row.closed is None or row.open is None or RULES_ARBITER.abstains(row.closed.text):
        return False
    closed_book = normalize(row.closed.text)
    return bool(closed_book) and closed_book == normalize(row.open.text)


def _choose_target(rows: Sequence[LabelRow], target: Target | None) -> Target:
    """Return the requested target, or the default for these rows."""
    default = _choose_default_target(rows)
    if target == "benefit" and default != "benefit":
        raise BadSetting(
            f"target='benefit' needs open-book answers, and {_count_without_benefit(rows)} of {len(rows)} rows have "
            "none: label with passages, or fit with target='known'."
        )
    return target or default


def _choose_default_target(rows: Sequence[LabelRow]) -> Target:
    n_open_book = len(rows) - _count_without_benefit(rows)
    return "benefit" if rows and n_open_book >= MIN_OPEN_BOOK_SHARE * len(rows) else "known"


def _count_without_benefit(rows: Sequence[LabelRow]) -> int:
    return sum(row.benefit is None for row in rows)


def _select_rows_with_both_answers(table: LabelTable) -> LabelTable:
    indices = [index for index, row in enumerate(table.rows) if row.open is not None]
    if not indices:
        raise BadInput(
            "target='agree' compares closed-book and open-book answers, and no row has an open-book answer. Label "
            "with an index, or import both answers."
        )
    return table.subset(indices)


def _needs_retrieval(row: LabelRow, target: Target) -> bool:
    if target == "agree":
        return not answers_agree(row)
    if target == "known":
        return not (row.closed and row.closed.correct)
    return row.benefit is not None and row.benefit > 0  # if nothing was found, retrieval does not help


def _explain_default_target(rows: Sequence[LabelRow], target: Target) -> str:
    if target == "benefit":
        return " ('benefit' was chosen because the rows have open-book answers)"
    without = _count_without_benefit(rows)
    return f" ('known' was chosen because {without} of {len(rows)} rows have no open-book answer)"


def _check_classes(needed: BoolArray, target: Target, target_reason: str, cause: str) -> None:
    """Raise if there are too few rows, in all or of one class."""
    if len(needed) < MIN_GRADED_ROWS:
        raise BadInput(
            f"fitting needs at least {MIN_GRADED_ROWS} graded rows; the label runs have {len(needed)}. Label more."
        )
    positive, negative = int(needed.sum()), int((~needed).sum())
    if min(positive, negative) < MIN_ROWS_PER_CLASS:
        raise BadInput(
            f"fitting on '{target}' needs {MIN_ROWS_PER_CLASS} questions of each class{target_reason}; the label runs "
            f"have {positive} that need retrieval and {negative} that do not. {cause or LABEL_MORE_ADVICE}"
        )


def _explain_one_class(rows: Sequence[LabelRow]) -> str:
    """Explain why all closed-book answers got the same grade if more questions would not help; '' otherwise."""
    texts = [row.closed.text for row in rows if row.closed]
    if not any(text.strip() for text in texts):
        return "Every closed-book answer is empty: label with more tokens, or check what was recorded."
    if all(RULES_ARBITER.abstains(text) for text in texts):
        return f"Every closed-book answer abstains ('{texts[0][:60]}'): label with prompts that make the LLM guess."
    return ""


def _check_training_split(texts: Sequence[str], needed: BoolArray) -> None:
    """Raise unless the training split has two distinct questions of each class, so that one can be held out."""
    classes = list(map_questions_to_needs(texts, needed).values())
    positive, negative = classes.count(True), classes.count(False)
    if min(positive, negative) < MIN_TRAINING_QUESTIONS_PER_CLASS:
        raise BadInput(
            f"the training split has {positive} distinct questions that need retrieval and {negative} that do not; "
            f"fitting needs {MIN_TRAINING_QUESTIONS_PER_CLASS} of each. Label more distinct questions, or try another "
            "`seed`."
        )
