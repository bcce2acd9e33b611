"""Numbers read off a pass over a question: token confidence, samples, hidden states, sentences; all as features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.signals.assessment import ASSESSMENT_LABELS, SELF_ASSESSMENT, self_assessment_logit
    from knowgate.signals.confidence import (
        check_draft_tokens,
        first,
        geometric_mean,
        inverse_perplexity,
        least,
        mean_margin,
        need_of,
    )
    from knowgate.signals.dispersion import ALPHA, SAMPLES, SEAKR, log_determinant
    from knowgate.signals.features import COSTLY, available, matrix
    from knowgate.signals.hidden import hidden_states
    from knowgate.signals.samples import Effect, benefit, canonical, certainty, effect, mastery
    from knowgate.signals.sentences import drafts, text_features
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "ALPHA",
    "ASSESSMENT_LABELS",
    "COSTLY",
    "Effect",
    "SAMPLES",
    "SEAKR",
    "SELF_ASSESSMENT",
    "available",
    "benefit",
    "canonical",
    "certainty",
    "check_draft_tokens",
    "drafts",
    "effect",
    "first",
    "geometric_mean",
    "hidden_states",
    "inverse_perplexity",
    "least",
    "log_determinant",
    "mastery",
    "matrix",
    "mean_margin",
    "need_of",
    "self_assessment_logit",
    "text_features",
]
