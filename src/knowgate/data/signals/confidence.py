"""Confidence of an LLM in its own answer: from the token probabilities of a draft, and from self-assessment.

The functions of token statistics return a number in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from knowgate.errors import BadSetting, ModelError, UnsupportedSignal
from knowgate.types import Completion, Token, Vector

EMPTY_DRAFT_NEED = 1.0  # an LLM that drafts nothing does not know
SELF_ASSESSMENT = "self_assessment"  # name of the recorded signal
ASSESSMENT_LABELS = ("true", "false")  # answers whose logits are compared when a run is labeled


def check_draft_tokens(gate: str, draft_tokens: int) -> None:
    """Raise BadSetting unless the number of draft tokens is at least 1."""
    if draft_tokens < 1:
        raise BadSetting(f"{gate}: draft_tokens={draft_tokens} is not allowed: it must be at least 1.")


def draft_need(draft: Completion | None, confidence: Callable[[Sequence[Token]], float], draft_tokens: int) -> float:
    """Return one minus the confidence of a draft, clipped to [0, 1].

    Args:
        draft: Draft with token log-probabilities.
        confidence: Function that returns the confidence of tokens.
        draft_tokens: Use this many tokens; the draft may be longer because another gate needs more.
    """
    if draft is None or draft.tokens is None:
        raise UnsupportedSignal("the reading has no token log-probabilities. Use a backend that offers 'logprobs'.")
    if not draft.tokens:
        return EMPTY_DRAFT_NEED
    value = confidence(draft.tokens[:draft_tokens])
    if math.isnan(value):  # min and max would turn it into 0, which means "knows"
        raise ModelError(f"the draft '{draft.text}' has token probabilities that are not numbers (NaN).")
    return min(1.0, max(0.0, 1 - value))


def first_probability(tokens: Sequence[Token]) -> float:
    """Return the probability of the first token."""
    return math.exp(tokens[0].logprob)


def geometric_mean(tokens: Sequence[Token]) -> float:
    """Return the geometric mean of the token probabilities."""
    return math.exp(sum(token.logprob for token in tokens) / len(tokens))


def min_probability(tokens: Sequence[Token]) -> float:
    """Return the lowest token probability."""
    return math.exp(min(token.logprob for token in tokens))


def inverse_perplexity(tokens: Sequence[Token]) -> float:
    """Return exp(-H) of the mean token entropy H: 1 for certain tokens, 1/V for uniform ones over V tokens."""
    entropies = [token.entropy for token in tokens if token.entropy is not None]
    if len(entropies) < len(tokens):
        raise UnsupportedSignal("this server gives no token entropies. Use logprob:first, mean, min or margin.")
    return math.exp(-sum(entropies) / len(entropies))


def mean_margin(tokens: Sequence[Token]) -> float:
    """Return the mean difference between the probabilities of the best and the second-best token."""
    margins = [token.margin for token in tokens if token.margin is not None]
    if len(margins) < len(tokens):
        raise UnsupportedSignal("this server gives no second-best token. Use logprob:first, mean or min.")
    return sum(margins) / len(margins)


def self_assessment_logit(logits: Vector) -> float:
    """Return z(known) - z(unknown) at the last marked position; positive if the LLM says that it can answer."""
    known, unknown = map(float, logits[-1])
    return known - unknown


def has_distinct_logits(logits: Vector) -> bool:
    """Return whether the last logits differ; a server that lists none of the labels gives all the same bound."""
    last = logits[-1]
    return bool((last != last[0]).any())
