"""Fitting the features arbiter: a logistic regression for each answer over cheap numbers of both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from knowgate.arbiters import OF_PASSAGES, SIDES, answer_features, answer_matrix, needs_of
from knowgate.fitting.arbiters.arbiter_result import ArbiterResult
from knowgate.fitting.arbiters.pairs import Pairs
from knowgate.fitting.networks import Tensors, check_finite, fit_linear
from knowgate.gates import apply_network
from knowgate.statistics import Floats


def fit_features(pairs: Pairs) -> ArbiterResult:
    """Weigh log-probabilities, lengths, agreement, abstaining and passages, those that every row has.

    So few weights need no rows to choose a strength or a calibration on: they learn from all but the test split.
    """
    names = answer_features(pairs.answers)
    features = answer_matrix(names, pairs.answers)
    check_finite(features)
    learnt = pairs.asked(np.concatenate([pairs.split.train, pairs.split.dev, pairs.split.calibration]))
    tensors: Tensors = {}
    for side, right in (("closed", pairs.closed_right), ("open", pairs.open_right)):
        fitted = fit_linear(features[learnt], right[learnt])
        tensors |= {f"{side}.{name}": block for name, block in fitted.items()}

    def raw(places: Sequence[int]) -> Floats:
        rows = features[list(places)]
        found: Floats = np.stack([apply_network(tensors, rows, f"{side}.") for side in SIDES], axis=1)
        return found

    return ArbiterResult(
        "features",
        {"features": names},
        needs_of(names),
        wants_passages=bool(OF_PASSAGES & set(names)),
        tensors=tensors,
        raw=raw,
        is_calibrated=True,  # a logistic regression of some ten numbers on hundreds of rows is
        notes=[f"goes by {', '.join(names)}"],
    )
