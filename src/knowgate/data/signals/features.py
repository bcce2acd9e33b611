"""What the numbers of a fusion say, for people: each with its name in words and its value as one would say it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from knowgate.data.signals import confidence
from knowgate.data.signals.confidence import SELF_ASSESSMENT
from knowgate.data.signals.samples import SEAKR, SEAKR_END, SEAKR_SAMPLES, canonical_answer, certainty, log_determinant
from knowgate.stats.logistic import sigmoid
from knowgate.types import Question, Reading, Token, Vector

PROBE_NAME = re.compile(r"probe-(?P<when>pre|post)-(?P<layer>\d+)")
POSITION_WORDS = {"pre": "before", "post": "after"}
FeatureFormatter = Callable[[float], str]


def _percent(words: str) -> FeatureFormatter:
    """Of features that are the logarithm of a share."""
    return lambda value: f"{words} {math.exp(min(value, 0.0)):.0%}"


def _count(words: str) -> FeatureFormatter:
    return lambda value: f"{words} {math.expm1(value):.0f}"


def _plain(words: str) -> FeatureFormatter:
    return lambda value: f"{words} {value:.2f}"


FEATURE_FORMATTERS: dict[str, FeatureFormatter] = {
    "first": _percent("first token"),
    "mean": _percent("mean token"),
    "min": _percent("least likely token"),
    "entropy": _percent("sharpness of its choices"),
    "margin": _percent("lead over the second choice"),
    "length": _count("tokens drafted"),
    "unfinished": lambda value: "the draft was cut off" if value else "the draft came to its end",
    "question_length": _count("characters asked"),
    SELF_ASSESSMENT: lambda value: f"it says it {'can' if value > 0 else 'cannot'} answer ({value:+.1f})",
    "certainty": lambda value: f"samples agree {value:.0%}",
    "agreement": lambda value: f"samples say the draft {value:.0%}",
    SEAKR: _plain("spread of the samples"),
    SEAKR_END: _plain("spread of the samples"),
}


def describe_feature(name: str, value: float) -> str:
    """A feature's value in words; of a probe, the need it sees."""
    if name in FEATURE_FORMATTERS:
        return FEATURE_FORMATTERS[name](value)
    probe = PROBE_NAME.fullmatch(name)
    place = f"layer {probe['layer']} {POSITION_WORDS[probe['when']]} the answer" if probe else name
    return f"{place} sees need {sigmoid(value):.0%}"


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
    return certainty([canonical_answer(sample.text, question) for sample in reading.samples])


def _agreement(question: Question, reading: Reading) -> float | None:
    """Share of the samples that say what the draft says."""
    if not reading.samples or reading.draft is None:
        return None
    own = canonical_answer(reading.draft.text, question)
    return sum(canonical_answer(sample.text, question) == own for sample in reading.samples) / len(reading.samples)


def _self_assessment(question: Question, reading: Reading) -> float | None:
    return reading.signals.get(SELF_ASSESSMENT)


def _seakr(name: str) -> Feature:
    """Which states a reading has, at the end token or before it, was settled by what was wanted of it."""

    def of(question: Question, reading: Reading) -> float | None:
        if name in reading.signals:
            return reading.signals[name]
        return None if reading.sample_states is None else log_determinant(reading.sample_states[:SEAKR_SAMPLES])

    return of


FEATURES: dict[str, Feature] = {
    "first": _token(confidence.first_probability),
    "mean": _token(confidence.geometric_mean),
    "min": _token(confidence.min_probability),
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
COSTLY_FEATURES = ("certainty", "agreement", SELF_ASSESSMENT, SEAKR, SEAKR_END)  # samples, or a pass of their own


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
