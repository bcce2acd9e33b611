"""Fitting the features arbiter: a logistic regression for each answer over cheap numbers of both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from knowgate.arbiters import OF_PASSAGES, SIDES, answer_features, answer_matrix, needs_of
from knowgate.fitting.arbiters.arbiter_result import ArbiterResult
from knowgate.fitting.arbiters.pairs import Pairs
from knowgate.fitting.networks import Tensors, best_linear, check_finite
from knowgate.gates import apply_network
from knowgate.statistics import Floats


def fit_features(pairs: Pairs) -> ArbiterResult:
    """Weigh log-probabilities, lengths, agreement, abstaining and passages, those that every row has."""
    names = answer_features(pairs.answers)
    features = answer_matrix(names, pairs.answers)
    check_finite(features)
    train, dev = pairs.split.train, pairs.split.dev
    tensors: Tensors = {}
    for side, right in (("closed", pairs.closed_right), ("open", pairs.open_right)):
        fitted = best_linear(features[train], right[train], features[dev], right[dev])
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
        notes=[f"goes by {', '.join(names)}"],
    )
