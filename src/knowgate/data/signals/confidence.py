"""Self-assessment: what a model says when it is asked whether it can answer, as one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from knowgate.errors import BadSetting, ModelError, NotOffered
from knowgate.types import Completion, Token, Vector

SELF_ASSESSMENT = "self_assessment"  # its name on record
ASSESSMENT_LABELS = ("true", "false")  # the words it is read between when a run is labelled


def self_assessment_logit(logits: Vector) -> float:
    """z(known) - z(unknown) at the last marked position: above 0 where it says that it can answer."""
    known, unknown = map(float, logits[-1])
    return known - unknown


def has_distinct_logits(logits: Vector) -> bool:
    """Whether anything is known of the labels: a server that lists none of them gives all of them the same bound."""
    last = logits[-1]
    return bool((last != last[0]).any())


EMPTY_DRAFT_NEED = 1.0  # the model had nothing to say


def check_draft_tokens(gate: str, draft_tokens: int) -> None:
    if draft_tokens < 1:
        raise BadSetting(f"{gate}: draft_tokens is {draft_tokens}; it must be at least 1.")


def draft_need(draft: Completion | None, confidence: Callable[[Sequence[Token]], float], draft_tokens: int) -> float:
    """1 - confidence of the first `draft_tokens`: the draft may be longer for another gate. Kept in [0, 1]."""
    if draft is None or draft.tokens is None:
        raise NotOffered("the reading has no token log-probabilities; the backend must offer 'logprobs'.")
    if not draft.tokens:
        return EMPTY_DRAFT_NEED
    value = confidence(draft.tokens[:draft_tokens])
    if math.isnan(value):  # min and max would turn it into 0: "knows"
        raise ModelError(f"the draft '{draft.text}' has token probabilities that are not numbers (NaN).")
    return min(1.0, max(0.0, 1 - value))


def first_probability(tokens: Sequence[Token]) -> float:
    return math.exp(tokens[0].logprob)


def geometric_mean(tokens: Sequence[Token]) -> float:
    return math.exp(sum(token.logprob for token in tokens) / len(tokens))


def min_probability(tokens: Sequence[Token]) -> float:
    return math.exp(min(token.logprob for token in tokens))


def inverse_perplexity(tokens: Sequence[Token]) -> float:
    """exp(-H) is 1 for a certain token and 1/V for one drawn evenly from V."""
    entropies = [token.entropy for token in tokens if token.entropy is not None]
    if len(entropies) < len(tokens):
        raise NotOffered("this server gives no token entropies; use logprob:first, mean, min or margin.")
    return math.exp(-sum(entropies) / len(entropies))


def mean_margin(tokens: Sequence[Token]) -> float:
    margins = [token.margin for token in tokens if token.margin is not None]
    if len(margins) < len(tokens):
        raise NotOffered("this server gives no second-best token; use logprob:first, mean or min.")
    return sum(margins) / len(margins)
