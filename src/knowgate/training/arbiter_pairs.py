"""Label runs to pairs of answers: questions of one LLM answered both ways, both graded, with disjoint splits."""

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
from knowgate.training.examples import MIN_ROWS_PER_CLASS, MIN_TRAINING_QUESTIONS_PER_CLASS, list_question_keys
from knowgate.types import AnswerPair, Signal

ONE_ARBITER_ADVICE = "fit one arbiter for each"
SHARED_SETTINGS = {
    "model_fingerprint": ONE_ARBITER_ADVICE,
    "prompts_fingerprint": ONE_ARBITER_ADVICE,
    "retriever_fingerprint": ONE_ARBITER_ADVICE,
    "max_tokens": "label with one --max-tokens",
}
MIN_PAIRS = 40  # pairs, below which splits are too small to mean anything
SIDE_NAMES = {"closed": "from memory", "open": "with passages"}


@dataclass(frozen=True)
class AnswerPairs:
    """Graded pairs of answers. `split` are places in them. left_out: rows of the runs that are none, by reason."""

    trial: LabelTable
    answers: list[AnswerPair]
    split: Split
    left_out: Mapping[str, int]

    @property
    def closed_right(self) -> BoolArray:
        return self.trial.closed_right

    @property
    def open_right(self) -> BoolArray:
        return self.trial.always_right

    @cached_property
    def differ(self) -> BoolArray:
        """Where there is something to choose."""
        return np.array([not answers_agree(both) for both in self.answers], dtype=bool)

    def seen(self, everything: bool = False) -> list[str]:
        """Fingerprints of the questions that fitting looked at: all, or those that were not held out for the test."""
        split = self.split
        used = np.concatenate([split.train, split.dev, split.calibration, *([split.test] if everything else [])])
        return list_question_keys([self.trial.questions[place] for place in used])

    def asked(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of these places at which an arbiter is asked: the others would teach it what it never sees."""
        return places[self.differ[places]]


def load_answer_pairs(runs: Sequence[Path], seed: int = 0) -> AnswerPairs:
    """Every graded row with both answers."""
    trial = load_label_table(runs, layers=(), required_equal=SHARED_SETTINGS)
    if any(not row.question for row in trial.rows):
        raise BadInput("the label runs are packed without their questions and answers; fit on those they were made of.")
    opened = [place for place, row in enumerate(trial.rows) if row.open is not None and row.open.correct is not None]
    without = len(trial.rows) - len(opened)
    if not opened:
        raise BadInput(
            f"no row of {', '.join(map(str, runs))} has an answer with passages: an arbiter chooses between two. Label "
            "with passages (knowgate label --index DIR), or import both (knowgate import-answers --closed A --open B)."
        )
    kept = trial.subset(opened)
    answers = [get_answer_pair(row) for row in kept.rows]
    pairs = AnswerPairs(
        kept, answers, split_questions([one.question.text for one in answers], seed), {"not opened": without}
    )
    check_answer_pairs(pairs)
    return pairs


def check_answer_pairs(pairs: AnswerPairs) -> None:
    """Refuse rows from which nothing can be learnt, and say why."""
    _check_texts(pairs.answers)
    n, different = len(pairs.answers), int(pairs.differ.sum())
    if different < MIN_PAIRS:
        raise BadInput(
            f"fitting an arbiter needs at least {MIN_PAIRS} questions whose two answers differ; the label runs have "
            f"{different} among {n} that are answered both ways. Label more."
        )
    train = pairs.asked(pairs.split.train)
    for side, right in (("closed", pairs.closed_right), ("open", pairs.open_right)):
        _check_kinds(side, int(right.sum()), n)
        _check_kinds(side, int(right[train].sum()), len(train), " that differ in the training split")


def _check_texts(answers: Sequence[AnswerPair]) -> None:
    for side, words in SIDE_NAMES.items():
        texts = [getattr(both, side).text for both in answers]
        if not any(text.strip() for text in texts):
            raise BadInput(f"every answer {words} is empty: there is nothing to choose between.")
        if all(RULES_ARBITER.abstains(text) for text in texts):
            raise BadInput(
                f"every answer {words} says that it cannot tell ('{texts[0][:60]}'): there is nothing to learn. Look "
                "at the prompts and the passages: knowgate report RUN"
            )


def _check_kinds(side: str, right: int, n: int, where: str = "") -> None:
    fewest = MIN_TRAINING_QUESTIONS_PER_CLASS if where else MIN_ROWS_PER_CLASS
    if min(right, n - right) < fewest:
        raise BadInput(
            f"of the {n} answers {SIDE_NAMES[side]}{where} {right} are right and {n - right} are wrong: an arbiter "
            f"learns from both, {fewest} of each at least. Label more questions, easier or harder ones."
        )


@dataclass(frozen=True)
class ArbiterResult:
    """The arbiter's name in the table, its options, what it must be shown, and its weights.

    raw: of the pairs at these places, how probably the answer from memory and the one with passages are right, two
    columns in [0, 1]. is_calibrated: they are probabilities already; else they are made so on the calibration split.
    notes: lines for the card. learnt_all: every pair taught it, the held-out ones too, which `raw` scores with a part
    of it that did not see them.
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
    learnt_all: bool = False
