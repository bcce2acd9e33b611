"""Answers in several rounds of retrieval, as the pipeline gives them: look up question and answer, answer again.

Goes on until nothing new is found, the answer repeats, or the rounds are used up. Knows models and retrievers by their
protocols; not how answers are graded or where they are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from knowgate.prompts import AnswerPrompts, fit_passages
from knowgate.retrieval import MOST_ROUNDS, follow_up, has_new, merged
from knowgate.text import normalise
from knowgate.types import Completion, Model, Passage, Question

Search = Callable[[Sequence[str]], list[list[Passage]]]


@dataclass
class Round:
    """A question on its way: what it was shown last, what was answered, how many rounds that took."""

    question: Question
    passages: Sequence[Passage]
    answer: Completion
    taken: int = 1
    tokens: int = 0  # generated after the first round
    is_done: bool = False


@dataclass(frozen=True)
class RoundAnswerer:
    """Goes on from answers of a first round. k: passages shown at a time."""

    model: Model
    prompts: AnswerPrompts
    search: Search
    k: int
    max_tokens: int

    def go_on(self, rounds: Sequence[Round]) -> None:
        """Take each as far as it goes, all of them side by side."""
        for taken in range(2, MOST_ROUNDS + 1):
            going = [one for one in rounds if not one.is_done]
            if not going:
                return
            self._look_further(going, taken)
            self._answer([one for one in going if not one.is_done])

    def _look_further(self, going: Sequence[Round], taken: int) -> None:
        found = self.search([follow_up(one.question.text, one.answer.text) for one in going])
        for one, passages in zip(going, found, strict=True):
            one.taken = taken
            best = merged(one.passages, passages)[: self.k]
            fitting = fit_passages(self.model, self.prompts, one.question, best, self.max_tokens)
            one.is_done = not has_new(one.passages, fitting)
            one.passages = one.passages if one.is_done else fitting

    def _answer(self, going: Sequence[Round]) -> None:
        asked = [self.prompts.open(one.question, one.passages) for one in going]
        for one, (answer,) in zip(going, self.model.generate(asked, max_tokens=self.max_tokens), strict=True):
            one.is_done = normalise(answer.text) == normalise(one.answer.text)
            one.answer, one.tokens = answer, one.tokens + answer.n_tokens
