"""Label runs to pairs of answers: questions of one LLM answered both ways, both graded, with disjoint splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from knowgate.arbiters import RULES, agree, both_answers
from knowgate.errors import BadInput
from knowgate.fitting.examples import FEWEST_OF_A_KIND, FEWEST_TRAINED, seen_keys
from knowgate.runs import Split, Trial, load_trial, split_questions
from knowgate.statistics import Bools
from knowgate.types import BothAnswers

ONE_ARBITER = "fit one arbiter for each"
TO_FIT = {
    "model_fingerprint": ONE_ARBITER,
    "prompts_fingerprint": ONE_ARBITER,
    "retriever_fingerprint": ONE_ARBITER,
    "max_tokens": "label with one --max-tokens",
}
FEWEST = 40  # pairs, below which splits are too small to mean anything
SIDE_WORDS = {"closed": "from memory", "open": "with passages"}


@dataclass(frozen=True)
class Pairs:
    """Graded pairs of answers. `split` are places in them. left_out: rows of the runs that are none, by reason."""

    trial: Trial
    answers: list[BothAnswers]
    split: Split
    left_out: Mapping[str, int]

    @property
    def closed_right(self) -> Bools:
        return self.trial.closed_right

    @property
    def open_right(self) -> Bools:
        return self.trial.always_right

    @cached_property
    def differ(self) -> Bools:
        """Where there is something to choose."""
        return np.array([not agree(both) for both in self.answers], dtype=bool)

    def seen(self, everything: bool = False) -> list[str]:
        """Fingerprints of the questions that fitting looked at: all, or those that were not held out for the test."""
        split = self.split
        used = np.concatenate([split.train, split.dev, split.calibration, *([split.test] if everything else [])])
        return seen_keys([self.trial.questions[place] for place in used])

    def asked(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of these places at which an arbiter is asked: the others would teach it what it never sees."""
        return places[self.differ[places]]


def load_pairs(runs: Sequence[Path], seed: int = 0) -> Pairs:
    """Every graded row with both answers."""
    trial = load_trial(runs, layers=(), same=TO_FIT)
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
    answers = [both_answers(row) for row in kept.rows]
    pairs = Pairs(kept, answers, split_questions([one.question.text for one in answers], seed), {"not opened": without})
    check_pairs(pairs)
    return pairs


def check_pairs(pairs: Pairs) -> None:
    """Refuse rows from which nothing can be learnt, and say why."""
    _check_texts(pairs.answers)
    n, different = len(pairs.answers), int(pairs.differ.sum())
    if different < FEWEST:
        raise BadInput(
            f"fitting an arbiter needs at least {FEWEST} questions whose two answers differ; the label runs have "
            f"{different} among {n} that are answered both ways. Label more."
        )
    train = pairs.asked(pairs.split.train)
    for side, right in (("closed", pairs.closed_right), ("open", pairs.open_right)):
        _check_kinds(side, int(right.sum()), n)
        _check_kinds(side, int(right[train].sum()), len(train), " that differ in the training split")


def _check_texts(answers: Sequence[BothAnswers]) -> None:
    for side, words in SIDE_WORDS.items():
        texts = [getattr(both, side).text for both in answers]
        if not any(text.strip() for text in texts):
            raise BadInput(f"every answer {words} is empty: there is nothing to choose between.")
        if all(RULES.abstains(text) for text in texts):
            raise BadInput(
                f"every answer {words} says that it cannot tell ('{texts[0][:60]}'): there is nothing to learn. Look "
                "at the prompts and the passages: knowgate report RUN"
            )


def _check_kinds(side: str, right: int, n: int, where: str = "") -> None:
    fewest = FEWEST_TRAINED if where else FEWEST_OF_A_KIND
    if min(right, n - right) < fewest:
        raise BadInput(
            f"of the {n} answers {SIDE_WORDS[side]}{where} {right} are right and {n - right} are wrong: an arbiter "
            f"learns from both, {fewest} of each at least. Label more questions, easier or harder ones."
        )
