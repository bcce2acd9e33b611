"""Confidence read off the tokens of a draft: each function gives a probability-like number in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from knowgate.errors import NotOffered
from knowgate.types import Completion, Token

EMPTY_DRAFT_NEED = 1.0  # the model had nothing to say


def need_of(draft: Completion | None, confidence: Callable[[Sequence[Token]], float]) -> float:
    """1 - confidence, kept in [0, 1] against rounding."""
    if draft is None or draft.tokens is None:
        raise NotOffered("the reading has no token log-probabilities; the backend must offer 'logprobs'.")
    if not draft.tokens:
        return EMPTY_DRAFT_NEED
    return min(1.0, max(0.0, 1 - confidence(draft.tokens)))


def first(tokens: Sequence[Token]) -> float:
    return math.exp(tokens[0].logprob)


def geometric_mean(tokens: Sequence[Token]) -> float:
    return math.exp(sum(token.logprob for token in tokens) / len(tokens))


def least(tokens: Sequence[Token]) -> float:
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
