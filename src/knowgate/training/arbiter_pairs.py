"""Training data of arbiters: questions with two graded answers, closed-book and open-book, split by question.

A closed-book answer is given from memory, an open-book answer with passages. An arbiter chooses between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.data.splits import Split, split_questions
from knowgate.errors import BadInput
from knowgate.gates.arbiters.arbitration import answers_agree
from knowgate.gates.arbiters.features import compute_answer_features
from knowgate.gates.arbiters.offline_arbitration import get_answer_pair
from knowgate.gates.artifacts.gate_folder import Tensors
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.training import examples
from knowgate.types import AnswerPair, Signal, Vector

HARDER_ADVICE = "Label more questions, easier or harder ones."
MIN_PAIRS = 40  # with fewer, the splits are too small
SIDE_NAMES = {"closed": "closed-book", "open": "open-book"}


@dataclass(frozen=True)
class AnswerPairs:
    """Questions with two graded answers: closed-book (from memory) and open-book (with passages).

    Attributes:
        table: The label table.
        answers: The pair of answers of each row.
        split: Indices of the train, dev, calibration and test rows.
        left_out: Number of rows without two graded answers, by reason.
        cache: Values computed from the answers. Copies with another split share the cache.
    """

    table: LabelTable
    answers: list[AnswerPair]
    split: Split
    left_out: Mapping[str, int]
    cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def closed_book_right(self) -> BoolArray:
        """Whether each closed-book answer is right."""
        return self.table.closed_book_right

    @property
    def open_book_right(self) -> BoolArray:
        """Whether each open-book answer is right."""
        return self.table.retrieved_right

    @property
    def differ(self) -> BoolArray:
        """Whether the two answers of each question differ; otherwise there is nothing to choose."""
        if "differ" not in self.cache:
            self.cache["differ"] = np.array([not answers_agree(pair) for pair in self.answers], dtype=bool)
        differ: BoolArray = self.cache["differ"]
        return differ

    @property
    def features(self) -> tuple[list[str], Vector]:
        """Names of the features that all pairs have, and their values: one row per pair, one column per name."""
        if "features" not in self.cache:
            self.cache["features"] = compute_answer_features(self.answers)
        names, matrix = self.cache["features"]
        return list(names), matrix

    def select_differing(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of those questions whose two answers differ. Only these need an arbiter."""
        return indices[self.differ[indices]]


@dataclass(frozen=True)
class ArbiterResult:
    """What a fit function for arbiters returns: a trained arbiter.

    Attributes:
        arbiter: Name under which the arbiter is registered.
        options: Options stored with it.
        needs: Signals that the arbiter needs from the LLM.
        wants_passages: Whether the arbiter reads the passages, too.
        raw: Returns for the rows with the given indices the probabilities that the closed-book and the open-book
            answer are right, two columns in [0, 1].
        tensors: Weights.
        is_calibrated: Whether the probabilities need no further calibration.
        notes: Lines for the model card.
        files: Further files of the arbiter's folder.
        uses_test_split: Whether test questions were trained on, too (cross-validation). `raw` then scores each of them
            with a member of the ensemble that was not trained on it.
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
    """Load the questions with two graded answers from label runs. Other questions are counted as left out.

    Raises:
        BadInput: There are too few pairs, or too few right or wrong answers to learn from.
    """
    required_equal = {**examples.SHARED_SETTINGS, "retriever_fingerprint": examples.FIT_SEPARATELY_ADVICE}
    every_row = load_label_table(runs, layers=(), required_equal=required_equal)
    examples.check_texts(every_row)
    table = _select_open_book(every_row, runs)
    answers = [get_answer_pair(row) for row in table.rows]
    split = split_questions([pair.question.text for pair in answers], seed)
    pairs = AnswerPairs(table, answers, split, {"not opened": len(every_row.rows) - len(answers)})
    check_answer_pairs(pairs)
    return pairs


def _select_open_book(table: LabelTable, runs: Sequence[Path]) -> LabelTable:
    """Select the rows with a graded open-book answer.

    Raises:
        BadInput: There are none.
    """
    indices = [i for i, row in enumerate(table.rows) if row.open is not None and row.open.correct is not None]
    if not indices:
        raise BadInput(
            f"no question in {', '.join(map(str, runs))} has an answer with passages. An arbiter chooses between answers with "
            "and without passages. Run `knowgate label` with `index`, or import both answers."
        )
    return table.subset(indices)


def check_answer_pairs(pairs: AnswerPairs) -> None:
    """Raise BadInput if an arbiter cannot learn from these pairs of answers."""
    for side, name in SIDE_NAMES.items():
        problem = examples.describe_useless_answers([getattr(pair, side).text for pair in pairs.answers])
        if problem:
            raise BadInput(
                f"no arbiter, which chooses between two answers, can be fitted on the {name} answers. {problem}"
            )
    n_pairs, n_different = len(pairs.answers), int(pairs.differ.sum())
    if n_different < MIN_PAIRS:
        raise BadInput(
            f"an arbiter (chooses between two answers) needs {MIN_PAIRS} questions with two different answers. Only "
            f"{n_different} of {n_pairs} questions have them. Label more questions with `knowgate label`."
        )
    _check_grades("closed-book", pairs.closed_book_right, pairs)
    _check_grades("open-book", pairs.open_book_right, pairs)


def _check_grades(side: str, right: BoolArray, pairs: AnswerPairs) -> None:
    """Raise BadInput if too few answers of a side are right, or too few are wrong."""
    what = (f"right {side} answers", f"wrong {side} answers")
    train = pairs.select_differing(pairs.split.train)
    examples.require_both_classes(right, examples.MIN_ROWS_PER_CLASS, what, HARDER_ADVICE)
    examples.require_both_classes(right[train], examples.MIN_TRAINING_QUESTIONS_PER_CLASS, what, HARDER_ADVICE)
