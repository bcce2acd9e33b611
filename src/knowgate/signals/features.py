"""Named numbers read off a reading: what the fusion gate weighs. The same code serves fitting and deciding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from knowgate.signals import confidence
from knowgate.signals.assessment import SELF_ASSESSMENT
from knowgate.signals.dispersion import SAMPLES, SEAKR, SEAKR_END, log_determinant
from knowgate.signals.samples import canonical, certainty
from knowgate.types import Question, Reading, Token, Vector

Feature = Callable[[Question, Reading], float | None]


def _token(function: Callable[[Sequence[Token]], float]) -> Feature:
    """A statistic of the draft's tokens as a log-odds-like number; None where there are no log-probabilities."""

    def of(question: Question, reading: Reading) -> float | None:
        tokens = reading.draft.tokens if reading.draft else None
        if tokens is None or any(token.entropy is None or token.margin is None for token in tokens):
            return None
        return math.log(max(function(tokens), 1e-6)) if tokens else math.log(1e-6)

    return of


def _length(question: Question, reading: Reading) -> float | None:
    """Tokens, or words where the backend gives no tokens: a server's own count would not be on record."""
    if reading.draft is None:
        return None
    return math.log1p(len(reading.draft.text.split()) if reading.draft.tokens is None else len(reading.draft.tokens))


def _unfinished(question: Question, reading: Reading) -> float | None:
    return float(not reading.draft.finished) if reading.draft else None


def _question_length(question: Question, reading: Reading) -> float | None:
    return math.log1p(len(question.text))


def _certainty(question: Question, reading: Reading) -> float | None:
    return certainty([canonical(sample.text, question) for sample in reading.samples])


def _agreement(question: Question, reading: Reading) -> float | None:
    """Share of the samples that say what the draft says."""
    if not reading.samples or reading.draft is None:
        return None
    own = canonical(reading.draft.text, question)
    return sum(canonical(sample.text, question) == own for sample in reading.samples) / len(reading.samples)


def _self_assessment(question: Question, reading: Reading) -> float | None:
    return reading.signals.get(SELF_ASSESSMENT)


def _seakr(name: str) -> Feature:
    """Which states a reading has, at the end token or before it, was settled by what was wanted of it."""

    def of(question: Question, reading: Reading) -> float | None:
        if name in reading.signals:
            return reading.signals[name]
        return None if reading.sample_states is None else log_determinant(reading.sample_states[:SAMPLES])

    return of


FEATURES: dict[str, Feature] = {
    "first": _token(confidence.first_probability),
    "mean": _token(confidence.geometric_mean),
    "min": _token(confidence.least_probability),
    "entropy": _token(confidence.inverse_perplexity),
    "margin": _token(lambda tokens: max(confidence.mean_margin(tokens), 1e-6)),
    "length": _length,
    "unfinished": _unfinished,
    "question_length": _question_length,
    SELF_ASSESSMENT: _self_assessment,
    "certainty": _certainty,
    "agreement": _agreement,
    SEAKR: _seakr(SEAKR),
    SEAKR_END: _seakr(SEAKR_END),
}
COSTLY = ("certainty", "agreement", SELF_ASSESSMENT, SEAKR, SEAKR_END)  # samples, or a pass of their own


def available_features(questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
    """Features that every one of these readings has."""
    pairs = list(zip(questions, readings, strict=True))
    return [name for name, feature in FEATURES.items() if all(feature(q, r) is not None for q, r in pairs)]


def feature_matrix(names: Sequence[str], questions: Sequence[Question], readings: Sequence[Reading]) -> Vector:
    """One row per question, one column per name; what is missing is NaN, which gates refuse."""
    rows = [
        [_number(FEATURES[name](question, reading)) for name in names]
        for question, reading in zip(questions, readings, strict=True)
    ]
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(names))


def _number(value: float | None) -> float:
    return math.nan if value is None else value
