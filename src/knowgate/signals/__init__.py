"""Numbers read off a pass over a question: token confidence, samples, hidden states, sentences; all as features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.signals.assessment import ASSESSMENT_LABELS, SELF_ASSESSMENT, self_assessment_logit, tells_apart
    from knowgate.signals.confidence import (
        check_draft_tokens,
        draft_need,
        first_probability,
        geometric_mean,
        inverse_perplexity,
        least_probability,
        mean_margin,
    )
    from knowgate.signals.dispersion import (
        ALPHA,
        SAMPLES,
        SEAKR,
        SEAKR_END,
        SEAKR_SIZE,
        log_determinant,
        log_size,
        relative,
    )
    from knowgate.signals.feature_words import say_feature
    from knowgate.signals.features import COSTLY, FEATURES, available_features, feature_matrix
    from knowgate.signals.hidden import hidden_states
    from knowgate.signals.samples import Effect, benefit, canonical, certainty, effect, mastery
    from knowgate.signals.sentences import draft_texts, text_features
    from knowgate.signals.surface import SURFACE_WIDTH, surface_features
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "ALPHA",
    "ASSESSMENT_LABELS",
    "COSTLY",
    "Effect",
    "FEATURES",
    "SAMPLES",
    "SEAKR",
    "SEAKR_END",
    "SEAKR_SIZE",
    "SELF_ASSESSMENT",
    "SURFACE_WIDTH",
    "available_features",
    "benefit",
    "canonical",
    "certainty",
    "check_draft_tokens",
    "draft_need",
    "draft_texts",
    "effect",
    "feature_matrix",
    "first_probability",
    "geometric_mean",
    "hidden_states",
    "inverse_perplexity",
    "least_probability",
    "log_determinant",
    "log_size",
    "mastery",
    "mean_margin",
    "relative",
    "say_feature",
    "self_assessment_logit",
    "surface_features",
    "tells_apart",
    "text_features",
]
