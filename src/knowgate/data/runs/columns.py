"""Columns of label rows, computed when first used, and the caveats that follow from them.

The rows may be in memory or on disk (see `storage`); columns are always in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from knowgate.core.text import estimate_tokens
from knowgate.data.runs.rows import GradedAnswer, LabelRow, list_slices
from knowgate.data.runs.storage import StoredQuestions, StoredRows, question_from_row
from knowgate.data.splits import fingerprint_question, fingerprint_text_loosely, mark_dev_rows
from knowgate.stats.metrics import BoolArray
from knowgate.types import Question, Reading

log = logging.getLogger(__name__)
COMPACT_TEXT: Any = np.dtypes.StringDType()  # texts of any length, in less memory than Python strings
AGREEMENT_GRADER = "agreement"  # grader of runs without gold answers


def list_caveats(rows: Sequence[LabelRow]) -> list[str]:
    """List the warnings that results on these rows need; empty for real questions with gold answers."""
    return LabelColumns(rows, []).list_caveats()


def describe_synthetic(n_synthetic: int, total: int) -> str:
    """Describe how many questions are synthetic (written by an LLM). "" if none is."""
    if not n_synthetic:
        return ""
    return (
        f"Synthetic: an LLM wrote {n_synthetic} of {total} questions from the documents. People ask other questions; "
        "check the results on real questions before you rely on them."
    )


def warn_if_mixed(n_synthetic: int, total: int) -> None:
    """Log a warning if synthetic and real questions are used together."""
    if 0 < n_synthetic < total:
        log.warning(describe_synthetic(n_synthetic, total))


def _make_column(compute: Callable[[LabelRow], Any], dtype: Any) -> cached_property[NDArray[Any]]:
    """Make a column that holds a value computed from each row."""
    return cached_property(lambda columns: np.array([compute(row) for row in columns.rows], dtype=dtype))


TOKEN_STATISTICS = ("entropy", "margin")  # statistics that servers with only the top tokens may lack


@dataclass(frozen=True)
class LabelColumns:
    """Label rows (answered and graded questions), with columns of one value per row.

    Closed-book means answered without passages, and open-book with passages.

    Attributes:
        rows: Label rows, in memory or on disk.
        readings: The signals of the LLM for each question, such as its draft answer. Gates decide by them.
    """

    rows: Sequence[LabelRow]
    readings: Sequence[Reading]

    @cached_property
    def questions(self) -> Sequence[Question]:
        """The question of each row."""
        if isinstance(self.rows, StoredRows):
            return StoredQuestions(self.rows)
        return [question_from_row(row) for row in self.rows]

    # The id of each question, which is unique within its run.
    ids = _make_column(lambda row: row.id, COMPACT_TEXT)
    # Whether the closed-book answer is right.
    closed_book_right = _make_column(lambda row: _is_right(row.closed), bool)
    # Whether there is an open-book answer.
    has_open_book_answer = _make_column(lambda row: row.open is not None, bool)
    # Whether the open-book answer is right; the closed-book answer where no passage was found.
    final_right = _make_column(lambda row: _is_right(_get_final_answer(row)), bool)
    # Whether there is an answer after several rounds of retrieval.
    has_iterative_answer = _make_column(lambda row: row.iterative is not None, bool)
    # Whether the iterative answer is right; the closed-book answer where there is none.
    final_iterative_right = _make_column(lambda row: _is_right(row.iterative or row.closed), bool)
    # Rounds of retrieval that the iterative answer took.
    retrieval_rounds = _make_column(lambda row: row.rounds, np.int64)
    # Length of the open-book answer in tokens.
    open_book_tokens = _make_column(lambda row: count_answer_tokens(row.open), np.float64)
    # Length of the closed-book answer in tokens.
    closed_book_tokens = _make_column(lambda row: count_answer_tokens(row.closed), np.float64)
    # Length of the passages in tokens: as recorded, else estimated from their texts; 0 if the row has none.
    passage_tokens = _make_column(lambda row: _count_passage_tokens(row), np.float64)
    # Whether the row holds the text of its question; packed runs do not.
    has_text = _make_column(lambda row: bool(row.question), bool)
    # Whether an LLM wrote the question.
    is_synthetic = _make_column(lambda row: row.is_synthetic, bool)
    # Whether "right" means equal to the open-book answer, because there is no gold answer.
    is_graded_by_agreement = _make_column(lambda row: row.grader == AGREEMENT_GRADER, bool)
    # Number of passages in the corpus with a gold answer. -1 means not counted.
    answer_frequencies = _make_column(
        lambda row: -1 if row.answer_frequency is None else row.answer_frequency, np.int64
    )

    @cached_property
    def is_dev(self) -> BoolArray:
        """Whether a threshold may be chosen on the row; depends on the question id alone."""
        return mark_dev_rows(self.ids.tolist())

    @cached_property
    def question_fingerprints(self) -> NDArray[np.str_]:
        """Fingerprint of each question; equal for equal questions."""
        return np.array([fingerprint_question(question) for question in self.questions], dtype=np.str_)

    @cached_property
    def loose_fingerprints(self) -> NDArray[np.str_]:
        """Fingerprint of each question, ignoring case, spaces and punctuation."""
        texts = (question.text for question in self.questions)
        return np.array([fingerprint_text_loosely(text) if text else "" for text in texts], dtype=np.str_)

    @cached_property
    def slices(self) -> NDArray[np.object_]:
        """The groups that each row belongs to, as (dimension, value) pairs such as ('language', 'en')."""
        return _share_equal(tuple(list_slices(row).items()) for row in self.rows)

    @cached_property
    def signal_names(self) -> NDArray[np.object_]:
        """Names of the signals that were recorded for each row, such as 'self_assessment'."""
        return _share_equal(frozenset(reading.signals) for reading in self.readings)

    @cached_property
    def token_statistics(self) -> NDArray[np.object_]:
        """Names of the token statistics that all draft tokens of a row have: "entropy", "margin"."""
        return _share_equal(_list_token_statistics(reading) for reading in self.readings)

    def list_caveats(self) -> list[str]:
        """List warnings about results on these rows.

        Examples: an LLM wrote the questions, or there are no gold answers.
        """
        total = len(self.rows)
        n_agreement = int(self.is_graded_by_agreement.sum())
        caveats = [describe_synthetic(int(self.is_synthetic.sum()), total)]
        if n_agreement:
            caveats.append(
                f"No gold answers: for {n_agreement} of {total} questions an answer counts as right if it equals the "
                "open-book answer. Accuracy means agreement here, and always retrieving is right by definition."
            )
        return [caveat for caveat in caveats if caveat]

    @property
    def computed_columns(self) -> dict[str, NDArray[Any]]:
        """Columns that were computed already, by name."""
        return {name: vars(self)[name] for name in COLUMN_NAMES if name in vars(self)}


COLUMN_NAMES = tuple(
    name for name, value in vars(LabelColumns).items() if isinstance(value, cached_property) and name != "questions"
)
ColumnsType = TypeVar("ColumnsType", bound=LabelColumns)


def fill_columns(columns: ColumnsType, known: Mapping[str, NDArray[Any]]) -> ColumnsType:
    """Store known values in the cached properties of `columns`, so that they are not computed, and return `columns`."""
    vars(columns).update(known)  # where `cached_property` stores a computed value, under its name
    return columns


def _is_right(answer: GradedAnswer | None) -> bool:
    return bool(answer and answer.correct)


def _get_final_answer(row: LabelRow) -> GradedAnswer | None:
    """Return the graded answer with passages, or else the answer without."""
    if row.open is not None and row.open.correct is not None:
        return row.open
    return row.closed


def count_answer_tokens(answer: GradedAnswer | None) -> float:
    """Return the length of an answer in tokens. Words are counted if tokens were not recorded."""
    if answer is None:
        return 0.0
    if answer.tokens is not None:
        return float(len(answer.tokens))
    return float(len(answer.text.split()) if answer.n_tokens is None else answer.n_tokens)


def _count_passage_tokens(row: LabelRow) -> float:
    """Return how many tokens the passages add to the prompt. A length that was not recorded is estimated."""
    open_book_length = row.open.prompt_tokens if row.open else None
    closed_book_length: float | None = row.closed.prompt_tokens if row.closed else None
    if open_book_length is None:
        return float(sum(estimate_tokens(f"{item.title} {item.text}") for item in row.passages))
    if closed_book_length is None:
        closed_book_length = estimate_tokens(row.question)
    return float(max(0, open_book_length - closed_book_length))


def _list_token_statistics(reading: Reading) -> frozenset[str]:
    tokens = (reading.draft.tokens if reading.draft else None) or ()
    return frozenset(name for name in TOKEN_STATISTICS if all(getattr(token, name) is not None for token in tokens))


def _share_equal(values: Iterable[Hashable]) -> NDArray[np.object_]:
    """Build a column with one shared object for equal values. This saves memory."""
    distinct: dict[Hashable, Hashable] = {}
    shared = [distinct.setdefault(value, value) for value in values]
    column = np.empty(len(shared), dtype=object)
    column[:] = shared
    return column
