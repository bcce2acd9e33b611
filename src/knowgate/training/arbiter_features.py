"""Fitting the features arbiter: a logistic regression for each answer over cheap numbers of both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from knowgate.gates.arbiters.features import (
    ANSWER_SIDES,
    PASSAGE_FEATURES,
    build_answer_matrix,
    get_required_signals,
    list_answer_features,
)
from knowgate.gates.artifacts.networks import apply_network
from knowgate.stats.metrics import FloatArray
from knowgate.training.arbiter_pairs import AnswerPairs, ArbiterResult
from knowgate.training.classifiers import Tensors, check_finite, fit_linear


def fit_features_arbiter(pairs: AnswerPairs) -> ArbiterResult:
    """Weigh log-probabilities, lengths, agreement, abstaining and passages, those that every row has.

    So few weights need no rows to choose a strength or a calibration on: they learn from all but the test split.
    """
    names = list_answer_features(pairs.answers)
    features = build_answer_matrix(names, pairs.answers)
    check_finite(features)
    learnt = pairs.asked(np.concatenate([pairs.split.train, pairs.split.dev, pairs.split.calibration]))
    tensors: Tensors = {}
    for side, right in (("closed", pairs.closed_right), ("open", pairs.open_right)):
        fitted = fit_linear(features[learnt], right[learnt])
        tensors |= {f"{side}.{name}": block for name, block in fitted.items()}

    def raw(places: Sequence[int]) -> FloatArray:
        rows = features[list(places)]
        found: FloatArray = np.stack([apply_network(tensors, rows, f"{side}.") for side in ANSWER_SIDES], axis=1)
        return found

    return ArbiterResult(
        "features",
        {"features": names},
        get_required_signals(names),
        wants_passages=bool(PASSAGE_FEATURES & set(names)),
        tensors=tensors,
        raw=raw,
        is_calibrated=True,  # a logistic regression of some ten numbers on hundreds of rows is
        notes=[f"goes by {', '.join(names)}"],
    )
