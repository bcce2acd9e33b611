"""Training data of arbiters: graded pairs of a closed-book and an open-book answer, split by question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.data.splits import Split, split_questions
from knowgate.errors import BadInput
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.arbiters.arbitration import answers_agree
from knowgate.gates.arbiters.offline_arbitration import get_answer_pair
from knowgate.gates.artifacts.gate_folder import Tensors
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.training.examples import MIN_ROWS_PER_CLASS, MIN_TRAINING_QUESTIONS_PER_CLASS, list_seen_keys
from knowgate.types import AnswerPair, Signal

ONE_ARBITER_ADVICE = "fit one arbiter for each"
SHARED_SETTINGS = {
    "model_fingerprint": ONE_ARBITER_ADVICE,
    "prompts_fingerprint": ONE_ARBITER_ADVICE,
    "retriever_fingerprint": ONE_ARBITER_ADVICE,
    "max_tokens": "label all runs with the same number of tokens",
}
MIN_PAIRS = 40  # with fewer, the splits are too small
SIDE_NAMES = {"closed": "closed-book", "open": "open-book"}


@dataclass(frozen=True)
class AnswerPairs:
    """Questions with two graded answers.

    Attributes:
        table: The label table.
        answers: The pair of answers of each row.
        split: Indices of the train, dev, calibration and test rows.
        left_out: Number of rows without two graded answers, by reason.
    """

    table: LabelTable
    answers: list[AnswerPair]
    split: Split
    left_out: Mapping[str, int]

    @property
    def closed_right(self) -> BoolArray:
        """Whether each closed-book answer is right."""
        return self.table.closed_right

    @property
    def open_right(self) -> BoolArray:
        """Whether each open-book answer is right."""
        return self.table.always_right

    @cached_property
    def differ(self) -> BoolArray:
        """Whether the two answers of each row differ, so that there is something to choose."""
        return np.array([not answers_agree(pair) for pair in self.answers], dtype=bool)

    def list_seen_keys(self, include_test: bool = False) -> list[str]:
        """List fingerprints of the questions used in fitting; with `include_test`, also of the test split."""
        return list_seen_keys(self.table.questions, self.split, include_test)

    def select_differing(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Select the rows whose answers differ: an arbiter is never asked about the others."""
        return indices[self.differ[indices]]


@dataclass(frozen=True)
class ArbiterResult:
    """A trained arbiter that is not calibrated yet.

    Attributes:
        arbiter: Name of the arbiter in the table.
        options: Options stored with it.
        needs: Signals that the model must provide.
        wants_passages: It reads the passages.
        raw: Returns for the rows with the given indices the probabilities that the closed-book and the open-book
            answer are right, two columns in [0, 1].
        tensors: Weights.
        is_calibrated: The probabilities are calibrated already.
        notes: Lines for the model card.
        files: Further files of the arbiter's folder.
        uses_test_split: Test questions were trained on, too; `raw` scores them with a member that did not see them.
    """

    arbiter: str
    options: Mapping[str, Any]
    needs: frozenset[Signal]
    wants_passages: bool
    raw: Callable[[Sequence[int]], FloatArray]
    tensors: Tensors = field(default_factory=dict)
    is_calibrated: bool = False
    notes: Sequence[str] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    uses_test_split: bool = False


def load_answer_pairs(runs: Sequence[Path], seed: int = 0) -> AnswerPairs:
    """Load every row of label runs that has two graded answers.

    Raises:
        BadInput: There are too few pairs, or too few right or wrong answers to learn from.
    """
    table = load_label_table(runs, layers=(), required_equal=SHARED_SETTINGS)
    if any(not row.question for row in table.rows):
        raise BadInput(
            "the label runs are packed without their questions and answers; fit on the runs they were made from."
        )
    indices = [i for i, row in enumerate(table.rows) if row.open is not None and row.open.correct is not None]
    if not indices:
        raise BadInput(
            f"no row of {', '.join(map(str, runs))} has an open-book answer, and an arbiter chooses between two. Label "
            "with an index, or import both answers."
        )
    left_out = {"not opened": len(table.rows) - len(indices)}
    table = table.subset(indices)
    answers = [get_answer_pair(row) for row in table.rows]
    split = split_questions([pair.question.text for pair in answers], seed)
    pairs = AnswerPairs(table, answers, split, left_out)
    check_answer_pairs(pairs)
    return pairs


def check_answer_pairs(pairs: AnswerPairs) -> None:
    """Raise BadInput if nothing can be learned from the pairs."""
    _check_texts(pairs.answers)
    n_pairs, n_different = len(pairs.answers), int(pairs.differ.sum())
    if n_different < MIN_PAIRS:
        raise BadInput(
            f"fitting an arbiter needs at least {MIN_PAIRS} questions whose two answers differ; the label runs have "
            f"{n_different} among {n_pairs} that are answered both ways. Label more."
        )
    train = pairs.select_differing(pairs.split.train)
    for side, right in (("closed", pairs.closed_right), ("open", pairs.open_right)):
        _check_grades(f"{SIDE_NAMES[side]} answers", right, MIN_ROWS_PER_CLASS)
        name = f"{SIDE_NAMES[side]} answers that differ in the training split"
        _check_grades(name, right[train], MIN_TRAINING_QUESTIONS_PER_CLASS)


def _check_texts(answers: Sequence[AnswerPair]) -> None:
    for side, name in SIDE_NAMES.items():
        texts = [getattr(pair, side).text for pair in answers]
        if not any(text.strip() for text in texts):
            raise BadInput(f"every {name} answer is empty: there is nothing to choose between.")
        if all(RULES_ARBITER.abstains(text) for text in texts):
            raise BadInput(
                f"every {name} answer abstains ('{texts[0][:60]}'): there is nothing to learn. Check prompts and "
                "passages with `knowgate report RUN`."
            )


def _check_grades(name: str, right: BoolArray, minimum: int) -> None:
    n_right, n_wrong = int(right.sum()), int((~right).sum())
    if min(n_right, n_wrong) < minimum:
        raise BadInput(
            f"of the {len(right)} {name}, {n_right} are right and {n_wrong} are wrong: an arbiter needs at least "
            f"{minimum} of each. Label more questions, easier or harder ones."
        )
