"""The features arbiter: two logistic regressions over cheap numbers of both answers. Asks no model.

Knows the two answers, their log-probabilities and the passages, where those are there; not what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from knowgate.core.schema import read_record
from knowgate.core.text import contains_tokens, join_tokens, tokenize
from knowgate.data.signals.confidence import geometric_mean, min_probability
from knowgate.errors import BadInput, NotOffered
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.arbiters.fitted_arbiter import FittedArbiter
from knowgate.gates.artifacts.networks import TensorValidator, apply_network, claim_network
from knowgate.stats.metrics import FloatArray
from knowgate.types import AnswerPair, Completion, Signal, Token, Vector

AnswerFeature = Callable[[AnswerPair], float | None]
AnswerSide = Callable[[AnswerPair], Completion]
ANSWER_SIDES: dict[str, AnswerSide] = {"closed": lambda both: both.closed, "open": lambda both: both.open}
MIN_PROBABILITY = 1e-6


def _tokens(side: AnswerSide, statistic: Callable[[Sequence[Token]], float]) -> AnswerFeature:
    """The logarithm of a statistic of the answer's tokens; None where there are no log-probabilities."""

    def of(both: AnswerPair) -> float | None:
        found = side(both).tokens
        if found is None:
            return None
        return math.log(max(statistic(found), MIN_PROBABILITY)) if found else math.log(MIN_PROBABILITY)

    return of


def _words(side: AnswerSide) -> AnswerFeature:
    return lambda both: math.log1p(len(tokenize(side(both).text)))


def _abstains(side: AnswerSide) -> AnswerFeature:
    return lambda both: float(RULES_ARBITER.abstains(side(both).text))


def _in_question(side: AnswerSide) -> AnswerFeature:
    """Share of the answer's words that the question has, too."""

    def of(both: AnswerPair) -> float:
        said, asked = tokenize(side(both).text), set(tokenize(both.question.text))
        return sum(word in asked for word in said) / max(1, len(said))

    return of


def _in_passages(side: AnswerSide) -> AnswerFeature:
    """Share of the passages that hold the answer; None where there are no passages."""

    def of(both: AnswerPair) -> float | None:
        if not both.passages:
            return None
        said = tokenize(side(both).text)
        held = [bool(said) and contains_answer(said, f"{one.title} {one.text}") for one in both.passages]
        return sum(held) / len(held)

    return of


def contains_answer(said: Sequence[str], text: str) -> bool:
    return f" {' '.join(said)} " in join_tokens(text)


def _same_words(both: AnswerPair) -> float:
    """F1 of the words of both answers."""
    first, second = set(tokenize(both.closed.text)), set(tokenize(both.open.text))
    return 2 * len(first & second) / max(1, len(first) + len(second))


def _one_holds_the_other(both: AnswerPair) -> float:
    first, second = tokenize(both.closed.text), tokenize(both.open.text)
    return float(contains_tokens(first, second) or contains_tokens(second, first))


def _scores(both: AnswerPair) -> list[float]:
    return sorted((one.score for one in both.passages if one.score is not None), reverse=True)


def _best_score(both: AnswerPair) -> float | None:
    found = _scores(both)
    return found[0] if found else None


def _lead(both: AnswerPair) -> float | None:
    """How far the best passage leads, as a share of its score."""
    found = _scores(both)
    if not found:
        return None
    return (found[0] - found[1]) / max(abs(found[0]), MIN_PROBABILITY) if len(found) > 1 else 1.0


SIDE_FEATURES: dict[str, Callable[[AnswerSide], AnswerFeature]] = {
    "mean": lambda side: _tokens(side, geometric_mean),
    "min": lambda side: _tokens(side, min_probability),
    "words": _words,
    "abstains": _abstains,
    "in_question": _in_question,
    "in_passages": _in_passages,
}
ANSWER_FEATURES: dict[str, AnswerFeature] = {
    **{f"{side}_{name}": make(ANSWER_SIDES[side]) for name, make in SIDE_FEATURES.items() for side in ANSWER_SIDES},
    "same_words": _same_words,
    "one_holds_the_other": _one_holds_the_other,
    "question_words": lambda both: math.log1p(len(tokenize(both.question.text))),
    "best_score": _best_score,
    "lead": _lead,
}
LOGPROB_FEATURES = frozenset(f"{side}_{name}" for side in ANSWER_SIDES for name in ("mean", "min"))
PASSAGE_FEATURES = frozenset({"closed_in_passages", "open_in_passages", "best_score", "lead"})


def list_answer_features(answers: Sequence[AnswerPair]) -> list[str]:
    """Features that every one of these pairs has."""
    return [name for name, of in ANSWER_FEATURES.items() if all(of(both) is not None for both in answers)]


def build_answer_matrix(names: Sequence[str], answers: Sequence[AnswerPair]) -> Vector:
    """One row per pair, one column per name; a pair that lacks one is refused."""
    rows = [[ANSWER_FEATURES[name](both) for name in names] for both in answers]
    for both, row in zip(answers, rows, strict=True):
        if None in row:
            what = "log-probabilities" if names[row.index(None)] in LOGPROB_FEATURES else "passages with scores"
            raise NotOffered(
                f"the arbiter was fitted on answers with {what}; those to '{both.question.text[:60]}' have none.",
                brief=f"the rows lack {what}",
            )
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(names))


@dataclass(frozen=True)
class FeaturesArbiterOptions:
    """What its fit leaves in `arbiter.json`."""

    features: tuple[str, ...]


class FeaturesArbiter(FittedArbiter):
    """Lengths, agreement, abstaining, log-probabilities and passages, weighed by two logistic regressions.

    Needs: log-probabilities where it was fitted with them. Cost: nothing beyond the answer from memory.
    """

    def check(self, tensors: TensorValidator) -> None:
        names = read_record(FeaturesArbiterOptions, self.artifact.options, "options").features
        if not names or not set(names) <= set(ANSWER_FEATURES):
            raise BadInput("its features are not those of a features arbiter.")
        for side in ANSWER_SIDES:
            claim_network(tensors, f"{side}.", len(names))

    def raw(self, answers: Sequence[AnswerPair]) -> FloatArray:
        features = build_answer_matrix(self.artifact.options["features"], answers)
        found: FloatArray = np.stack(
            [apply_network(self.artifact.tensors, features, f"{side}.") for side in ANSWER_SIDES], axis=1
        )
        return found


def get_required_signals(names: Sequence[str]) -> frozenset[Signal]:
    """What the LLM must give for these features."""
    return frozenset({Signal.LOGPROBS}) if LOGPROB_FEATURES & set(names) else frozenset()
