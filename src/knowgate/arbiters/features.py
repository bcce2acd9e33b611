"""The features arbiter: two logistic regressions over cheap numbers of both answers. Asks no model.

Knows the two answers, their log-probabilities and the passages, where those are there; not what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from knowgate.arbiters.fitted import FittedArbiter
from knowgate.arbiters.rules import RULES
from knowgate.errors import BadInput, NotOffered
from knowgate.gates import ExpectedTensors, apply_network, expect_network
from knowgate.signals import geometric_mean, least_probability
from knowgate.statistics import Floats
from knowgate.text import contains_tokens, spaced, tokens
from knowgate.types import BothAnswers, Completion, Signal, Token, Vector

Feature = Callable[[BothAnswers], float | None]
Side = Callable[[BothAnswers], Completion]
SIDES: dict[str, Side] = {"closed": lambda both: both.closed, "open": lambda both: both.open}
LEAST = 1e-6


def _tokens(side: Side, statistic: Callable[[Sequence[Token]], float]) -> Feature:
    """The logarithm of a statistic of the answer's tokens; None where there are no log-probabilities."""

    def of(both: BothAnswers) -> float | None:
        found = side(both).tokens
        if found is None:
            return None
        return math.log(max(statistic(found), LEAST)) if found else math.log(LEAST)

    return of


def _words(side: Side) -> Feature:
    return lambda both: math.log1p(len(tokens(side(both).text)))


def _abstains(side: Side) -> Feature:
    return lambda both: float(RULES.abstains(side(both).text))


def _in_question(side: Side) -> Feature:
    """Share of the answer's words that the question has, too."""

    def of(both: BothAnswers) -> float:
        said, asked = tokens(side(both).text), set(tokens(both.question.text))
        return sum(word in asked for word in said) / max(1, len(said))

    return of


def _in_passages(side: Side) -> Feature:
    """Share of the passages that hold the answer; None where there are no passages."""

    def of(both: BothAnswers) -> float | None:
        if not both.passages:
            return None
        said = tokens(side(both).text)
        held = [bool(said) and spaced_in(said, f"{one.title} {one.text}") for one in both.passages]
        return sum(held) / len(held)

    return of


def spaced_in(said: Sequence[str], text: str) -> bool:
    return f" {' '.join(said)} " in spaced(text)


def _same_words(both: BothAnswers) -> float:
    """F1 of the words of both answers."""
    first, second = set(tokens(both.closed.text)), set(tokens(both.open.text))
    return 2 * len(first & second) / max(1, len(first) + len(second))


def _one_holds_the_other(both: BothAnswers) -> float:
    first, second = tokens(both.closed.text), tokens(both.open.text)
    return float(contains_tokens(first, second) or contains_tokens(second, first))


def _scores(both: BothAnswers) -> list[float]:
    return sorted((one.score for one in both.passages if one.score is not None), reverse=True)


def _best_score(both: BothAnswers) -> float | None:
    found = _scores(both)
    return found[0] if found else None


def _lead(both: BothAnswers) -> float | None:
    """How far the best passage leads, as a share of its score."""
    found = _scores(both)
    if not found:
        return None
    return (found[0] - found[1]) / max(abs(found[0]), LEAST) if len(found) > 1 else 1.0


PER_SIDE: dict[str, Callable[[Side], Feature]] = {
    "mean": lambda side: _tokens(side, geometric_mean),
    "min": lambda side: _tokens(side, least_probability),
    "words": _words,
    "abstains": _abstains,
    "in_question": _in_question,
    "in_passages": _in_passages,
}
ANSWER_FEATURES: dict[str, Feature] = {
    **{f"{side}_{name}": make(SIDES[side]) for name, make in PER_SIDE.items() for side in SIDES},
    "same_words": _same_words,
    "one_holds_the_other": _one_holds_the_other,
    "question_words": lambda both: math.log1p(len(tokens(both.question.text))),
    "best_score": _best_score,
    "lead": _lead,
}
OF_TOKENS = frozenset(f"{side}_{name}" for side in SIDES for name in ("mean", "min"))
OF_PASSAGES = frozenset({"closed_in_passages", "open_in_passages", "best_score", "lead"})


def answer_features(answers: Sequence[BothAnswers]) -> list[str]:
    """Features that every one of these pairs has."""
    return [name for name, of in ANSWER_FEATURES.items() if all(of(both) is not None for both in answers)]


def answer_matrix(names: Sequence[str], answers: Sequence[BothAnswers]) -> Vector:
    """One row per pair, one column per name; a pair that lacks one is refused."""
    rows = [[ANSWER_FEATURES[name](both) for name in names] for both in answers]
    for both, row in zip(answers, rows, strict=True):
        if None in row:
            what = "log-probabilities" if names[row.index(None)] in OF_TOKENS else "passages with scores"
            raise NotOffered(
                f"the arbiter was fitted on answers with {what}; those to '{both.question.text[:60]}' have none.",
                brief=f"the rows lack {what}",
            )
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(names))


class FeaturesArbiter(FittedArbiter):
    """Lengths, agreement, abstaining, log-probabilities and passages, weighed by two logistic regressions.

    Needs: log-probabilities where it was fitted with them. Cost: nothing beyond the answer from memory.
    """

    def check(self, tensors: ExpectedTensors) -> None:
        names = self.artefact.options.get("features")
        if not isinstance(names, list) or not names or any(name not in ANSWER_FEATURES for name in names):
            raise BadInput("its features are not those of a features arbiter.")
        for side in SIDES:
            expect_network(tensors, f"{side}.", len(names))

    def raw(self, answers: Sequence[BothAnswers]) -> Floats:
        features = answer_matrix(self.artefact.options["features"], answers)
        found: Floats = np.stack([apply_network(self.artefact.tensors, features, f"{side}.") for side in SIDES], axis=1)
        return found


def needs_of(names: Sequence[str]) -> frozenset[Signal]:
    """What the LLM must give for these features."""
    return frozenset({Signal.LOGPROBS}) if OF_TOKENS & set(names) else frozenset()
