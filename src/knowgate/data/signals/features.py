"""Named features of a reading (what the LLM generated for a question), which are the inputs of the fusion gate.

Training and deciding use the same functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from knowgate.core.text import cut_answer
from knowgate.data.signals import confidence
from knowgate.data.signals.confidence import SELF_ASSESSMENT
from knowgate.data.signals.samples import SEAKR, SEAKR_END, SEAKR_SAMPLES, canonical_answer, certainty, log_determinant
from knowgate.stats.metrics import sigmoid
from knowgate.types import Question, Reading, Token, Vector

MIN_PROBABILITY = 1e-6  # lower bound before taking logarithms
MIN_SURPRISAL = 1e-4  # the same for surprisals (negative log-probabilities)
PROBE_NAME = re.compile(r"probe-(?P<position>pre|post)-(?P<layer>\d+)")
POSITION_WORDS = {"pre": "before", "post": "after"}
Feature = Callable[[Question, Reading], float | None]  # None if the reading lacks the signal
FeatureFormatter = Callable[[float], str]


def _make_token_feature(statistic: Callable[[Sequence[Token]], float], field: str = "logprob") -> Feature:
    """Make a feature: the logarithm of a statistic over the draft's tokens.

    The feature is None if token data is missing.

    Args:
        statistic: Computes a number from 0 to 1 from the tokens.
        field: Field of a token that the statistic reads. Servers do not always return `entropy` and `margin`.
    """

    def compute(question: Question, reading: Reading) -> float | None:
        tokens = reading.draft.tokens if reading.draft else None
        if tokens is None or any(getattr(token, field) is None for token in tokens):
            return None
        value = statistic(tokens) if tokens else 0.0  # an empty draft is as uncertain as possible
        return math.log(max(value, MIN_PROBABILITY))

    return compute


def _make_surprisal_feature(token_feature: Feature) -> Feature:
    """Make the feature log(-log p) from a feature log p.

    It tells probabilities close to 1 apart, such as 0.99 and 0.999.
    """

    def compute(question: Question, reading: Reading) -> float | None:
        logarithm = token_feature(question, reading)
        return None if logarithm is None else math.log(max(-logarithm, MIN_SURPRISAL))

    return compute


def _compute_length(question: Question, reading: Reading) -> float | None:
    """Return the log length of the draft in tokens, or else in words."""
    if reading.draft is None:
        return None
    parts = reading.draft.text.split() if reading.draft.tokens is None else reading.draft.tokens
    return math.log1p(len(parts))


def _compute_certainty(question: Question, reading: Reading) -> float | None:
    return certainty([canonical_answer(sample.text, question) for sample in reading.samples])


def _compute_agreement(question: Question, reading: Reading) -> float | None:
    """Return the share of sampled answers equal to the draft, or None."""
    if not reading.samples or reading.draft is None:
        return None
    draft = canonical_answer(cut_answer(reading.draft.text), question)
    return sum(canonical_answer(sample.text, question) == draft for sample in reading.samples) / len(reading.samples)


def _make_seakr_feature(name: str) -> Feature:
    """Make a feature: how much the hidden states of sampled answers differ (SeaKR). None if unavailable."""

    def compute(question: Question, reading: Reading) -> float | None:
        if name in reading.signals:
            return reading.signals[name]
        return None if reading.sample_states is None else log_determinant(reading.sample_states[:SEAKR_SAMPLES])

    return compute


_MEAN = _make_token_feature(confidence.geometric_mean)
_MIN = _make_token_feature(confidence.min_probability)
FEATURES: dict[str, Feature] = {
    "first": _make_token_feature(confidence.first_probability),
    "mean": _MEAN,
    "min": _MIN,
    "mean_surprisal": _make_surprisal_feature(_MEAN),
    "min_surprisal": _make_surprisal_feature(_MIN),
    "entropy": _make_token_feature(confidence.inverse_perplexity, "entropy"),
    "margin": _make_token_feature(confidence.mean_margin, "margin"),
    "length": _compute_length,
    "unfinished": lambda question, reading: float(not reading.draft.finished) if reading.draft else None,
    "question_length": lambda question, reading: math.log1p(len(question.text)),
    SELF_ASSESSMENT: lambda question, reading: reading.signals.get(SELF_ASSESSMENT),
    "certainty": _compute_certainty,
    "agreement": _compute_agreement,
    SEAKR: _make_seakr_feature(SEAKR),
    SEAKR_END: _make_seakr_feature(SEAKR_END),
}
COSTLY_FEATURES = ("certainty", "agreement", SELF_ASSESSMENT, SEAKR, SEAKR_END)  # need samples or another pass


def available_features(questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
    """List the features that can be computed for all questions. NaN counts as computed."""
    pairs = list(zip(questions, readings, strict=True))
    return [name for name, feature in FEATURES.items() if all(feature(*pair) is not None for pair in pairs)]


def feature_matrix(names: Sequence[str], questions: Sequence[Question], readings: Sequence[Reading]) -> Vector:
    """Compute features as a matrix with a row per question and a column per feature. A missing feature becomes NaN."""
    rows = [
        [FEATURES[name](question, reading) for name in names]
        for question, reading in zip(questions, readings, strict=True)
    ]
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(names))


# --- descriptions ---------------------------------------------------------------------------------


def _format_log_share(text: str) -> FeatureFormatter:
    """Make a formatter that puts a share, which is given as a logarithm, into a text as a percentage."""
    return lambda value: text.format(100 * math.exp(min(value, 0.0)))


def _format_surprisal(text: str) -> FeatureFormatter:
    """Make a formatter for the logarithm of a surprisal, which is shown as a probability in percent."""
    return lambda value: text.format(100 * math.exp(-math.exp(value)))


def _format_log_count(text: str) -> FeatureFormatter:
    """Make a formatter that puts a count, which is given as log(1 + count), into a text."""
    return lambda value: text.format(math.expm1(value))


FEATURE_FORMATTERS: dict[str, FeatureFormatter] = {
    "first": _format_log_share("its first word is {:.0f} % certain"),
    "mean": _format_log_share("its words are {:.0f} % certain on average"),
    "min": _format_log_share("its least certain word is {:.0f} % certain"),
    "mean_surprisal": _format_surprisal("its words are {:.0f} % certain on average"),
    "min_surprisal": _format_surprisal("its least certain word is {:.0f} % certain"),
    "entropy": _format_log_share("its choice among all words is {:.0f} % certain"),
    "margin": _format_log_share("its words lead over their alternatives by {:.0f} %"),
    "length": _format_log_count("the length of its draft in tokens is {:.0f}"),
    "unfinished": lambda value: "the draft was cut off" if value else "the draft is complete",
    "question_length": _format_log_count("the question has {:.0f} characters"),
    SELF_ASSESSMENT: lambda value: f"it says it {'can' if value > 0 else 'cannot'} answer ({value:+.1f})",
    "certainty": lambda value: f"{100 * value:.0f} % of its samples agree",
    "agreement": lambda value: f"{100 * value:.0f} % of its samples equal the draft",
    SEAKR: lambda value: f"its samples differ by {value:.2f}",
    SEAKR_END: lambda value: f"its samples differ by {value:.2f}",
}


def describe_feature(name: str, value: float) -> str:
    """Describe a feature and its value in words, to explain a decision to users."""
    if name in FEATURE_FORMATTERS:
        return FEATURE_FORMATTERS[name](value)
    probe = PROBE_NAME.fullmatch(name)
    if probe is None:  # the feature is the score of a gate, as a logit
        return f"{name} (need {100 * sigmoid(value):.0f} %)"
    # The logit of a probe (a classifier on hidden states) says nothing to users, so only its input is named.
    return f"its hidden states {POSITION_WORDS[probe['position']]} the answer"
