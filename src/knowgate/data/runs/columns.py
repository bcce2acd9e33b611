"""The rows of a trial as columns: one number (or one name) for each row, worked out when it is first asked for.

Rows may be in memory or on disk (see `stored`); columns are in memory either way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from knowgate.core.text import estimate_tokens
from knowgate.data.runs.caveats import AGREEMENT_GRADER
from knowgate.data.runs.rows import GradedAnswer, LabelRow, list_slices
from knowgate.data.runs.storage import MappedSequence, StoredRows, question_from_row
from knowgate.data.splits import fingerprint_question, fingerprint_text_loosely, mark_dev_rows
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.types import Question, Reading

TOKEN_STATISTICS = ("entropy", "margin")  # of tokens: a server that shows only the top tokens may lack them


@dataclass(frozen=True)
class LabelColumns:
    """Graded questions, each with its row, its key over all runs, and what gates saw of it."""

    rows: Sequence[LabelRow]
    keys: Sequence[str]
    readings: Sequence[Reading]

    @cached_property
    def questions(self) -> Sequence[Question]:
        if isinstance(self.rows, StoredRows):
            return MappedSequence(self.rows, question_from_row)
        return [question_from_row(row) for row in self.rows]

    @cached_property
    def closed_right(self) -> BoolArray:
        """Whether the closed-book answer is right."""
        return np.array([_is_right(row.closed) for row in self.rows], dtype=bool)

    @cached_property
    def opened(self) -> BoolArray:
        """Whether there is an answer with passages."""
        return np.array([row.open is not None for row in self.rows], dtype=bool)

    @cached_property
    def final_right(self) -> BoolArray:
        """Whether the answer with passages is right, or the closed-book one where nothing was found."""
        return np.array([_is_right(_final(row)) for row in self.rows], dtype=bool)

    @cached_property
    def iterated(self) -> BoolArray:
        return np.array([row.iterative is not None for row in self.rows], dtype=bool)

    @cached_property
    def iterated_right(self) -> BoolArray:
        return np.array([_is_right(row.iterative or row.closed) for row in self.rows], dtype=bool)

    @cached_property
    def rounds_taken(self) -> NDArray[np.int64]:
        return np.array([row.rounds for row in self.rows], dtype=np.int64)

    @cached_property
    def dev(self) -> BoolArray:
        """Rows a threshold may be chosen on; which ones depends on the question's id alone."""
        return mark_dev_rows([row.id for row in self.rows])

    @cached_property
    def open_lengths(self) -> FloatArray:
        return np.array([_length(row.open) for row in self.rows])

    @cached_property
    def closed_lengths(self) -> FloatArray:
        return np.array([_length(row.closed) for row in self.rows])

    @cached_property
    def passage_lengths(self) -> FloatArray:
        """Tokens of the passages, estimated from their texts; 0 where the row holds none."""
        counts = [sum(estimate_tokens(f"{one.title} {one.text}") for one in row.passages) for row in self.rows]
        return np.array(counts, dtype=np.float64)

    @cached_property
    def question_keys(self) -> NDArray[np.str_]:
        """The fingerprint of each question: the same for one that is asked twice."""
        return np.array([fingerprint_question(question) for question in self.questions], dtype=np.str_)

    @cached_property
    def loose_keys(self) -> NDArray[np.str_]:
        """The same however a question is written; '' for rows without their texts."""
        return np.array(
            [fingerprint_text_loosely(one.text) if one.text else "" for one in self.questions], dtype=np.str_
        )

    @cached_property
    def has_text(self) -> BoolArray:
        return np.array([bool(row.question) for row in self.rows], dtype=bool)

    @cached_property
    def synthetic(self) -> BoolArray:
        return np.array([row.is_synthetic for row in self.rows], dtype=bool)

    @cached_property
    def agreed(self) -> BoolArray:
        """Rows without a gold answer: right is what says the same as the answer with passages."""
        return np.array([row.grader == AGREEMENT_GRADER for row in self.rows], dtype=bool)

    @cached_property
    def frequencies(self) -> NDArray[np.int64]:
        """Passages of the corpus that hold a gold answer; -1 where nobody counted."""
        counts = [-1 if row.answer_frequency is None else row.answer_frequency for row in self.rows]
        return np.array(counts, dtype=np.int64)

    @cached_property
    def kinds(self) -> NDArray[np.object_]:
        """The slices of each row by dimension (`slice_values`); rows of one kind share theirs."""
        return _objects(tuple(list_slices(row).items()) for row in self.rows)

    @cached_property
    def signal_names(self) -> NDArray[np.object_]:
        """The names of the signals of each reading."""
        return _objects(frozenset(reading.signals) for reading in self.readings)

    @cached_property
    def token_facts(self) -> NDArray[np.object_]:
        """Of each reading, what all tokens of its draft have: 'entropy', 'margin'."""
        return _objects(_of_all_tokens(reading) for reading in self.readings)

    @property
    def known(self) -> dict[str, NDArray[Any]]:
        """The columns that were worked out already, by name."""
        return {name: vars(self)[name] for name in COLUMN_NAMES if name in vars(self)}


COLUMN_NAMES = tuple(
    name for name, made in vars(LabelColumns).items() if isinstance(made, cached_property) and name != "questions"
)
ColumnsType = TypeVar("ColumnsType", bound=LabelColumns)


def fill_columns(columns: ColumnsType, known: Mapping[str, NDArray[Any]]) -> ColumnsType:
    """With columns that are known already: in the place where a property that was asked for keeps its own."""
    vars(columns).update(known)
    return columns


def _is_right(side: GradedAnswer | None) -> bool:
    return bool(side and side.correct)


def _final(row: LabelRow) -> GradedAnswer | None:
    return row.open if row.open is not None and row.open.correct is not None else row.closed


def _length(side: GradedAnswer | None) -> float:
    """Tokens of the greedy answer; words where the backend gave no tokens."""
    if side is None:
        return 0.0
    return float(len(side.tokens) if side.tokens is not None else len(side.text.split()))


def _of_all_tokens(reading: Reading) -> frozenset[str]:
    tokens = (reading.draft.tokens if reading.draft else None) or ()
    return frozenset(name for name in TOKEN_STATISTICS if all(getattr(token, name) is not None for token in tokens))


def _objects(values: Iterable[Hashable]) -> NDArray[np.object_]:
    """One object where several are equal: a million rows have a handful of kinds."""
    seen: dict[Hashable, Hashable] = {}
    found = [seen.setdefault(value, value) for value in values]
    column = np.empty(len(found), dtype=object)
    column[:] = found
    return column
