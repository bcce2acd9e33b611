"""The `features` arbiter: two logistic regressions predict from cheap features which answers are right.

One predicts whether the closed-book answer (without passages) is right, the other whether the open-book answer (with
passages) is. No model is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from knowgate.core.schema import read_record
from knowgate.core.text import cut_answer, join_tokens, tokenize
from knowgate.data.signals.confidence import geometric_mean, min_probability
from knowgate.errors import BadInput, UnsupportedSignal
from knowgate.gates.arbiters.abstention import RULES_ARBITER, answers_agree
from knowgate.gates.arbiters.fitted_arbiter import FittedArbiter
from knowgate.gates.artifacts.networks import TensorValidator, apply_network, require_network
from knowgate.stats.metrics import FloatArray
from knowgate.types import AnswerPair, Completion, Signal, Token, Vector

ANSWER_SIDES = ("closed", "open")
MIN_PROBABILITY = 1e-6


# --- features of one of the two answers -----------------------------------------------------------


def _read_words(answer: str) -> list[str]:
    """Return the words of an answer. Of a very long answer, only the beginning is read."""
    return tokenize(cut_answer(answer))


def _log_statistic(answer: Completion, statistic: Callable[[Sequence[Token]], float]) -> float | None:
    """Return the logarithm of a statistic of an answer's token probabilities; None if the LLM gave no probabilities."""
    if answer.tokens is None:
        return None
    probability = statistic(answer.tokens) if answer.tokens else 0.0
    return math.log(max(probability, MIN_PROBABILITY))


def _question_overlap(answer: Completion, pair: AnswerPair) -> float:
    """Return the share of an answer's words that occur in the question."""
    words, question_words = _read_words(answer.text), set(tokenize(pair.question.text))
    return sum(word in question_words for word in words) / max(1, len(words))


def _passage_share(answer: Completion, pair: AnswerPair) -> float | None:
    """Return the share of the passages that contain the answer; None without passages."""
    if not pair.passages:
        return None
    words = " ".join(_read_words(answer.text))
    if not words:
        return 0.0
    texts = [join_tokens(f"{passage.title} {passage.text}") for passage in pair.passages]
    # Tokens are joined with spaces on both sides, so that only whole words match.
    return sum(f" {words} " in text for text in texts) / len(texts)


# --- features of both answers ---------------------------------------------------------------------


def _word_f1(pair: AnswerPair) -> float:
    """Return the F1 score between the words of the two answers. Equal words give 1."""
    closed_book, open_book = set(_read_words(pair.closed.text)), set(_read_words(pair.open.text))
    return 2 * len(closed_book & open_book) / max(1, len(closed_book) + len(open_book))


def _rank_scores(pair: AnswerPair) -> list[float]:
    """Return the retrieval scores of the passages, best first."""
    return sorted((passage.score for passage in pair.passages if passage.score is not None), reverse=True)


def _score_lead(pair: AnswerPair) -> float | None:
    """Return how far the best retrieval score is above the second best, as (best - second) / best."""
    scores = _rank_scores(pair)
    if len(scores) < 2:
        return 1.0 if scores else None
    best, second = scores[:2]
    return (best - second) / max(abs(best), MIN_PROBABILITY)


# Artifacts refer to a feature of one answer by its side and its name here, such as 'closed_mean' or 'open_words'.
SIDE_FEATURES: dict[str, Callable[[Completion, AnswerPair], float | None]] = {
    "mean": lambda answer, pair: _log_statistic(answer, geometric_mean),
    "min": lambda answer, pair: _log_statistic(answer, min_probability),
    "words": lambda answer, pair: math.log1p(len(_read_words(answer.text))),
    "abstains": lambda answer, pair: float(RULES_ARBITER.abstains(answer.text)),
    "in_question": _question_overlap,
    "in_passages": _passage_share,
}
PAIR_FEATURES: dict[str, Callable[[AnswerPair], float | None]] = {
    "same_words": _word_f1,
    "one_holds_the_other": lambda pair: float(answers_agree(pair.closed.text, pair.open.text)),
    "question_words": lambda pair: math.log1p(len(tokenize(pair.question.text))),
    "best_score": lambda pair: max(_rank_scores(pair), default=None),
    "lead": _score_lead,
}
ANSWER_FEATURES = (*(f"{side}_{name}" for name in SIDE_FEATURES for side in ANSWER_SIDES), *PAIR_FEATURES)
LOGPROB_FEATURES = frozenset(f"{side}_{name}" for side in ANSWER_SIDES for name in ("mean", "min"))
PASSAGE_FEATURES = frozenset({"closed_in_passages", "open_in_passages", "best_score", "lead"})


def compute_answer_feature(name: str, pair: AnswerPair) -> float | None:
    """Compute a feature of a pair of answers by name.

    Example: 'open_words' is a feature of the answer with passages.
    """
    if name in PAIR_FEATURES:
        return PAIR_FEATURES[name](pair)
    side, _, kind = name.partition("_")
    answer = pair.closed if side == "closed" else pair.open
    return SIDE_FEATURES[kind](answer, pair)


def compute_answer_features(answers: Sequence[AnswerPair]) -> tuple[list[str], Vector]:
    """Compute the features that every pair of answers has.

    Returns:
        Their names, and a matrix with one row per pair and one column per name.
    """
    columns: dict[str, list[float]] = {}
    for name in ANSWER_FEATURES:
        values = [compute_answer_feature(name, pair) for pair in answers]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            columns[name] = known
    matrix = np.array(list(columns.values()), dtype=np.float32).reshape(len(columns), len(answers))
    return list(columns), np.ascontiguousarray(matrix.T)


def build_answer_matrix(names: Sequence[str], answers: Sequence[AnswerPair]) -> Vector:
    """Compute the named features, one row per pair of answers and one column per name.

    Raises:
        UnsupportedSignal: A feature cannot be computed, because log-probabilities or scored passages are missing.
    """
    rows = [[compute_answer_feature(name, pair) for name in names] for pair in answers]
    for pair, row in zip(answers, rows, strict=True):
        if None in row:
            missing = "log-probabilities" if names[row.index(None)] in LOGPROB_FEATURES else "passages with scores"
            raise UnsupportedSignal(
                f"the answers to '{pair.question.text[:60]}' have no {missing}. The arbiter (chooses between two answers) was "
                f"fitted with them. Provide {missing}, or fit the arbiter again without them.",
                brief=f"the recorded answers have no {missing}",
            )
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(names))  # two dimensions, even without answers


@dataclass(frozen=True)
class FeaturesArbiterOptions:
    """Options of a features arbiter in `arbiter.json`: the names of its features."""

    features: tuple[str, ...]


class FeaturesArbiter(FittedArbiter):
    """Predicts with two logistic regressions how probably the two answers are right.

    Features are, for example, the lengths, token probabilities and agreement of the answers.

    Needs: log-probabilities if it was fitted with them. Cost: nothing beyond the closed-book answer.
    """

    def check(self, tensors: TensorValidator) -> None:
        """Raise BadInput if the features or tensors of the arbiter are wrong.

        There are two classifiers: for answers without passages (closed-book) and with passages (open-book).
        """
        names = read_record(FeaturesArbiterOptions, self.artifact.options, "options").features
        if not names or not set(names) <= set(ANSWER_FEATURES):
            raise BadInput(
                f"the list of input features is empty or has an unknown name: {', '.join(names)[:80] or 'none'}."
            )
        for side in ANSWER_SIDES:
            require_network(tensors, f"{side}.", len(names))

    def raw(self, answers: Sequence[AnswerPair]) -> FloatArray:
        """Compute the uncalibrated probability that each answer is right; columns: closed-book, open-book."""
        features = build_answer_matrix(self.artifact.options["features"], answers)
        columns = [apply_network(self.artifact.tensors, features, f"{side}.") for side in ANSWER_SIDES]
        return np.stack(columns, axis=1)


def get_required_signals(names: Sequence[str]) -> frozenset[Signal]:
    """Return the signals that the LLM must provide for the named features: log-probabilities or none."""
    return frozenset({Signal.LOGPROBS}) if LOGPROB_FEATURES & set(names) else frozenset()
