"""Questions with two answers each, written by hand: what an arbiter weighs, and label runs of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.types import AnswerPair, Arbiter, Belief, Completion, Passage, Question, Token
from tests.support.hand_gate import graded_row, write_rows


def both(closed: str, opened: str, question: str = "Who wrote it?", **values: Any) -> AnswerPair:
    return AnswerPair(Question(question), Completion(closed), Completion(opened), **values)


@dataclass(frozen=True)
class Prefers(Arbiter):
    """Believes the answer that holds its word; counts what it is asked."""

    word: str = "memory"
    asked: list[str] | None = None

    @property
    def name(self) -> str:
        return "prefers"

    @property
    def fingerprint(self) -> str:
        return f"prefers-{self.word}"

    def estimate(self, answers: Sequence[AnswerPair]) -> list[Belief]:
        if self.asked is not None:
            self.asked.extend(one.question.text for one in answers)
        return [Belief(float(self.word in one.closed.text), float(self.word in one.open.text)) for one in answers]


def pair_row(name: str, need: float, closed: bool, opened: bool, *, texts: tuple[str, str] | None = None) -> LabelRow:
    """A graded row whose answers differ, with log-probabilities on both sides: right answers are surer."""
    said = texts or (f"memory {name}", f"found {name}")
    sides = [
        GradedAnswer(text, (Token(text, -0.1 if right else -2.0, 0.5, 0.5),), correct=right)
        for text, right in zip(said, (closed, opened), strict=True)
    ]
    row = graded_row(name, need, closed, opened)
    first = row.closed.tokens[0] if row.closed and row.closed.tokens else None  # the need is read off it
    tokens = (Token(sides[0].text, first.logprob, 0.5, 0.5), *(sides[0].tokens or ())) if first else None
    held = (Passage("p", "nothing of it", score=1.0), Passage("q", "words", score=0.5))
    return LabelRow(
        name,
        f"question {name}?",
        "en",
        closed=GradedAnswer(said[0], tokens, correct=closed),
        open=sides[1],
        benefit=int(opened) - int(closed),
        grader="contains",
        passages=held,
    )


def pair_rows(n: int, seed: int = 0) -> list[LabelRow]:
    """The lower the need, the likelier the answer from memory is right; every other open-book answer is right."""
    rng = np.random.default_rng(seed)
    needs, dice, coins = rng.uniform(0.01, 0.99, n), rng.uniform(size=n), rng.uniform(size=n) < 0.6
    return [pair_row(f"{seed}-{i}", float(needs[i]), bool(dice[i] > needs[i]), bool(coins[i])) for i in range(n)]


def pair_run(path: Path, n: int = 200, seed: int = 0) -> Path:
    return write_rows(path, pair_rows(n, seed))
