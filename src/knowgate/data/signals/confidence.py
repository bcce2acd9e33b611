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
        raise BadSetting(f"the gate '{gate}' cannot use draft_tokens={draft_tokens}. Use at least 1.")


def draft_need(draft: Completion | None, confidence: Callable[[Sequence[Token]], float], draft_tokens: int) -> float:
    """Return the need for retrieval: one minus the confidence in a draft. An empty draft has need 1.

    Args:
        draft: Short closed-book answer with token log-probabilities.
        confidence: Function that computes the confidence in [0, 1] from tokens.
        draft_tokens: Number of tokens to use; the draft may be longer because another gate needs more.
    """
    if draft is None or draft.tokens is None:
        raise UnsupportedSignal(
            "the LLM's answer has no token log-probabilities. Use a model backend that returns log-probabilities."
        )
    if not draft.tokens:
        return EMPTY_DRAFT_NEED
    value = confidence(draft.tokens[:draft_tokens])
    if math.isnan(value):  # min and max would turn it into 0, which means "knows"
        raise ModelError(
            f"the answer '{draft.text}' has token probabilities that are not numbers (NaN). Check the model or server."
        )
    return min(1.0, max(0.0, 1 - value))


def is_empty_draft(draft: Completion) -> bool:
    """Return whether a draft has no text. One token of white space does not count: it can be a beginning."""
    can_continue = not draft.finished and draft.n_tokens == 1
    return draft.is_empty and not can_continue


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
    """Return exp(-H), with H as the mean token entropy. The value is 1 if every token is certain."""
    entropies = [token.entropy for token in tokens if token.entropy is not None]
    if len(entropies) < len(tokens):
        raise UnsupportedSignal(
            "gate 'logprob:entropy' needs token entropies, but the server returns none. Use logprob:first, logprob:mean, "
            "logprob:min or logprob:margin."
        )
    return math.exp(-sum(entropies) / len(entropies))


def mean_margin(tokens: Sequence[Token]) -> float:
    """Return the mean difference between the probabilities of the best and the second-best token."""
    margins = [token.margin for token in tokens if token.margin is not None]
    if len(margins) < len(tokens):
        raise UnsupportedSignal(
            "gate 'logprob:margin' needs the second-best token, but the server does not list it. Use logprob:first, "
            "logprob:mean or logprob:min."
        )
    return sum(margins) / len(margins)


def self_assessment_logit(logits: Vector) -> float:
    """Return the logit of "known" minus the logit of "unknown". Positive means the LLM says it can answer.

    Args:
        logits: One row per position in the prompt, with the logits of both labels. The last row counts.
    """
    known, unknown = map(float, logits[-1])
    return known - unknown


def has_distinct_logits(logits: Vector) -> bool:
    """Return whether the labels have different logits.

    Servers may list only likely tokens, so missing labels have equal logits.

    Args:
        logits: One row per position in the prompt, with the logit of each label. The last row counts.
    """
    last = logits[-1]
    return bool((last != last[0]).any())
