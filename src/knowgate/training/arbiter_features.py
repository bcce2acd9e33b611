"""Fit the features arbiter: a logistic regression for each answer over cheap features of both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from knowgate.gates.arbiters import features as arbiter_features
from knowgate.gates.artifacts.networks import apply_network
from knowgate.stats.metrics import FloatArray
from knowgate.training.arbiter_pairs import AnswerPairs, ArbiterResult
from knowgate.training.classifiers import Tensors, check_finite, fit_linear


def fit_features_arbiter(pairs: AnswerPairs) -> ArbiterResult:
    """Fit two logistic regressions over cheap features: one per answer, each predicting whether it is right.

    The features are log-probabilities, lengths, agreement, abstention and passages; those that some row lacks are left
    out. So few weights need no rows for tuning or calibration, so they are trained on everything but the test split.
    """
    names = arbiter_features.list_answer_features(pairs.answers)
    features = arbiter_features.build_answer_matrix(names, pairs.answers)
    check_finite(features)
    split = pairs.split
    train = pairs.select_differing(np.concatenate([split.train, split.dev, split.calibration]))
    tensors: Tensors = {}
    for side, right in (("closed", pairs.closed_right), ("open", pairs.open_right)):
        fitted = fit_linear(features[train], right[train])
        tensors |= {f"{side}.{name}": block for name, block in fitted.items()}

    def raw(indices: Sequence[int]) -> FloatArray:
        rows = features[list(indices)]
        columns = [apply_network(tensors, rows, f"{side}.") for side in arbiter_features.ANSWER_SIDES]
        beliefs: FloatArray = np.stack(columns, axis=1)
        return beliefs

    return ArbiterResult(
        "features",
        {"features": names},
        arbiter_features.get_required_signals(names),
        wants_passages=bool(arbiter_features.PASSAGE_FEATURES & set(names)),
        tensors=tensors,
        raw=raw,
        is_calibrated=True,  # a logistic regression of about ten features on hundreds of rows is well calibrated
        notes=[f"uses {', '.join(names)}"],
    )
