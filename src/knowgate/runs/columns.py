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

from knowgate.runs.caveats import AGREEMENT
from knowgate.runs.readings import question_of
from knowgate.runs.rows import GradedAnswer, LabelRow
from knowgate.runs.slices import slice_values
from knowgate.runs.split import dev_part, loose_key, question_key
from knowgate.runs.stored import Each, StoredRows
from knowgate.statistics import Bools, Floats
from knowgate.text import estimate_tokens
from knowgate.types import Question, Reading

FACTS = ("entropy", "margin")  # of tokens: a server that shows only the top tokens may lack them


@dataclass(frozen=True)
class Columns:
    """Graded questions, each with its row, its key over all runs, and what gates saw of it."""

    rows: Sequence[LabelRow]
    keys: Sequence[str]
    readings: Sequence[Reading]

    @cached_property
    def questions(self) -> Sequence[Question]:
        if isinstance(self.rows, StoredRows):
            return Each(self.rows, question_of)
        return [question_of(row) for row in self.rows]

    @cached_property
    def closed_right(self) -> Bools:
        """Whether the closed-book answer is right."""
        return np.array([_is_right(row.closed) for row in self.rows], dtype=bool)

    @cached_property
    def opened(self) -> Bools:
        """Whether there is an answer with passages."""
        return np.array([row.open is not None for row in self.rows], dtype=bool)

    @cached_property
    def final_right(self) -> Bools:
        """Whether the answer with passages is right, or the closed-book one where nothing was found."""
        return np.array([_is_right(_final(row)) for row in self.rows], dtype=bool)

    @cached_property
    def iterated(self) -> Bools:
        return np.array([row.iterative is not None for row in self.rows], dtype=bool)

    @cached_property
    def iterated_right(self) -> Bools:
        return np.array([_is_right(row.iterative or row.closed) for row in self.rows], dtype=bool)

    @cached_property
    def rounds_taken(self) -> NDArray[np.int64]:
        return np.array([row.rounds for row in self.rows], dtype=np.int64)

    @cached_property
    def dev(self) -> Bools:
        """Rows a threshold may be chosen on; which ones depends on the question's id alone."""
        return dev_part([row.id for row in self.rows])

    @cached_property
    def open_lengths(self) -> Floats:
        return np.array([_length(row.open) for row in self.rows])

    @cached_property
    def closed_lengths(self) -> Floats:
        return np.array([_length(row.closed) for row in self.rows])

    @cached_property
    def passage_lengths(self) -> Floats:
        """Tokens of the passages, estimated from their texts; 0 where the row holds none."""
        counts = [sum(estimate_tokens(f"{one.title} {one.text}") for one in row.passages) for row in self.rows]
        return np.array(counts, dtype=np.float64)

    @cached_property
    def question_keys(self) -> NDArray[np.str_]:
        """The fingerprint of each question: the same for one that is asked twice."""
        return np.array([question_key(question) for question in self.questions], dtype=np.str_)

    @cached_property
    def loose_keys(self) -> NDArray[np.str_]:
        """The same however a question is written; '' for rows without their texts."""
        return np.array([loose_key(one.text) if one.text else "" for one in self.questions], dtype=np.str_)

    @cached_property
    def has_text(self) -> Bools:
        return np.array([bool(row.question) for row in self.rows], dtype=bool)

    @cached_property
    def synthetic(self) -> Bools:
        return np.array([row.is_synthetic for row in self.rows], dtype=bool)

    @cached_property
    def agreed(self) -> Bools:
        """Rows without a gold answer: right is what says the same as the answer with passages."""
        return np.array([row.grader == AGREEMENT for row in self.rows], dtype=bool)

    @cached_property
    def frequencies(self) -> NDArray[np.int64]:
        """Passages of the corpus that hold a gold answer; -1 where nobody counted."""
        counts = [-1 if row.answer_frequency is None else row.answer_frequency for row in self.rows]
        return np.array(counts, dtype=np.int64)

    @cached_property
    def kinds(self) -> NDArray[np.object_]:
        """The slices of each row by dimension (`slice_values`); rows of one kind share theirs."""
        return _objects(tuple(slice_values(row).items()) for row in self.rows)

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
        return {name: vars(self)[name] for name in COLUMNS if name in vars(self)}


COLUMNS = tuple(
    name for name, made in vars(Columns).items() if isinstance(made, cached_property) and name != "questions"
)
Filled = TypeVar("Filled", bound=Columns)


def fill(columns: Filled, known: Mapping[str, NDArray[Any]]) -> Filled:
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
    return frozenset(name for name in FACTS if all(getattr(token, name) is not None for token in tokens))


def _objects(values: Iterable[Hashable]) -> NDArray[np.object_]:
    """One object where several are equal: a million rows have a handful of kinds."""
    seen: dict[Hashable, Hashable] = {}
    found = [seen.setdefault(value, value) for value in values]
    column = np.empty(len(found), dtype=object)
    column[:] = found
    return column
