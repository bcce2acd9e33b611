"""The `features` arbiter: two logistic regressions over cheap features of both answers. Calls no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from knowgate.core.schema import read_record
from knowgate.core.text import contains_tokens, join_tokens, tokenize
from knowgate.data.signals.confidence import geometric_mean, min_probability
from knowgate.errors import BadInput, UnsupportedSignal
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.arbiters.fitted_arbiter import FittedArbiter
from knowgate.gates.artifacts.networks import TensorValidator, apply_network, claim_network
from knowgate.stats.metrics import FloatArray
from knowgate.types import AnswerPair, Completion, Signal, Token, Vector

AnswerFeature = Callable[[AnswerPair], float | None]
AnswerSide = Callable[[AnswerPair], Completion]
ANSWER_SIDES: dict[str, AnswerSide] = {"closed": lambda pair: pair.closed, "open": lambda pair: pair.open}
MIN_PROBABILITY = 1e-6


def _log_token_statistic(side: AnswerSide, statistic: Callable[[Sequence[Token]], float]) -> AnswerFeature:
    """Make a feature: the logarithm of a token statistic, None without log-probabilities."""

    def compute(pair: AnswerPair) -> float | None:
        tokens = side(pair).tokens
        if tokens is None:
            return None
        return math.log(max(statistic(tokens), MIN_PROBABILITY)) if tokens else math.log(MIN_PROBABILITY)

    return compute


def _log_length(side: AnswerSide) -> AnswerFeature:
    """Make a feature: log(1 + number of words)."""
    return lambda pair: math.log1p(len(tokenize(side(pair).text)))


def _abstains(side: AnswerSide) -> AnswerFeature:
    """Make a feature: whether the answer abstains."""
    return lambda pair: float(RULES_ARBITER.abstains(side(pair).text))


def _question_overlap(side: AnswerSide) -> AnswerFeature:
    """Make a feature: the share of the answer's words that are in the question."""

    def compute(pair: AnswerPair) -> float:
        words, question_words = tokenize(side(pair).text), set(tokenize(pair.question.text))
        return sum(word in question_words for word in words) / max(1, len(words))

    return compute


def _passage_share(side: AnswerSide) -> AnswerFeature:
    """Make a feature: the share of the passages that contain the answer, None without passages."""

    def compute(pair: AnswerPair) -> float | None:
        if not pair.passages:
            return None
        answer = " ".join(tokenize(side(pair).text))
        texts = [join_tokens(f"{passage.title} {passage.text}") for passage in pair.passages]
        return sum(bool(answer) and f" {answer} " in text for text in texts) / len(texts)

    return compute


def _word_f1(pair: AnswerPair) -> float:
    """Compute the F1 score of the words of both answers."""
    closed, opened = set(tokenize(pair.closed.text)), set(tokenize(pair.open.text))
    return 2 * len(closed & opened) / max(1, len(closed) + len(opened))


def _contains_other(pair: AnswerPair) -> float:
    """Return 1 if one answer contains the other."""
    closed, opened = tokenize(pair.closed.text), tokenize(pair.open.text)
    return float(contains_tokens(closed, opened) or contains_tokens(opened, closed))


def _rank_scores(pair: AnswerPair) -> list[float]:
    """Return the retrieval scores of the passages, best first."""
    return sorted((passage.score for passage in pair.passages if passage.score is not None), reverse=True)


def _best_score(pair: AnswerPair) -> float | None:
    """Return the best retrieval score, None without scores."""
    scores = _rank_scores(pair)
    return scores[0] if scores else None


def _score_lead(pair: AnswerPair) -> float | None:
    """Compute the lead of the best passage over the second, relative to its score."""
    scores = _rank_scores(pair)
    if not scores:
        return None
    return (scores[0] - scores[1]) / max(abs(scores[0]), MIN_PROBABILITY) if len(scores) > 1 else 1.0


# Artifacts refer to features by these names.
SIDE_FEATURES: dict[str, Callable[[AnswerSide], AnswerFeature]] = {
    "mean": lambda side: _log_token_statistic(side, geometric_mean),
    "min": lambda side: _log_token_statistic(side, min_probability),
    "words": _log_length,
    "abstains": _abstains,
    "in_question": _question_overlap,
    "in_passages": _passage_share,
}
ANSWER_FEATURES: dict[str, AnswerFeature] = {
    **{f"{side}_{name}": make(ANSWER_SIDES[side]) for name, make in SIDE_FEATURES.items() for side in ANSWER_SIDES},
    "same_words": _word_f1,
    "one_holds_the_other": _contains_other,
    "question_words": lambda pair: math.log1p(len(tokenize(pair.question.text))),
    "best_score": _best_score,
    "lead": _score_lead,
}
LOGPROB_FEATURES = frozenset(f"{side}_{name}" for side in ANSWER_SIDES for name in ("mean", "min"))
PASSAGE_FEATURES = frozenset({"closed_in_passages", "open_in_passages", "best_score", "lead"})


def list_answer_features(answers: Sequence[AnswerPair]) -> list[str]:
    """Return the names of the features that every pair has."""
    return [name for name, compute in ANSWER_FEATURES.items() if all(compute(pair) is not None for pair in answers)]


def build_answer_matrix(names: Sequence[str], answers: Sequence[AnswerPair]) -> Vector:
    """Compute features, one row per pair and one column per name.

    Raises:
        UnsupportedSignal: A pair lacks a feature.
    """
    rows = [[ANSWER_FEATURES[name](pair) for name in names] for pair in answers]
    for pair, row in zip(answers, rows, strict=True):
        if None in row:
            missing = "log-probabilities" if names[row.index(None)] in LOGPROB_FEATURES else "passages with scores"
            raise UnsupportedSignal(
                f"the arbiter was fitted on answers with {missing}; those to '{pair.question.text[:60]}' have none.",
                brief=f"the rows lack {missing}",
            )
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(names))


@dataclass(frozen=True)
class FeaturesArbiterOptions:
    """Options in the manifest of a features arbiter."""

    features: tuple[str, ...]


class FeaturesArbiter(FittedArbiter):
    """Predicts with two logistic regressions which answers are right.

    The features are lengths, agreement, abstention, log-probabilities and passages.

    Needs: log-probabilities if it was fitted with them. Cost: nothing beyond the closed-book answer.
    """

    def check(self, tensors: TensorValidator) -> None:
        """Check the feature names and the tensors of both classifiers."""
        names = read_record(FeaturesArbiterOptions, self.artifact.options, "options").features
        if not names or not set(names) <= set(ANSWER_FEATURES):
            raise BadInput("its features are missing or unknown.")
        for side in ANSWER_SIDES:
            claim_network(tensors, f"{side}.", len(names))

    def raw(self, answers: Sequence[AnswerPair]) -> FloatArray:
        """Apply one classifier for each side."""
        features, tensors = build_answer_matrix(self.artifact.options["features"], answers), self.artifact.tensors
        return np.stack([apply_network(tensors, features, f"{side}.") for side in ANSWER_SIDES], axis=1)


def get_required_signals(names: Sequence[str]) -> frozenset[Signal]:
    """Return the signals that the LLM must provide for these features."""
    return frozenset({Signal.LOGPROBS}) if LOGPROB_FEATURES & set(names) else frozenset()
