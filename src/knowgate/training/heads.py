"""Two heads: P(right from memory) and P(right with passages), from which gates compute the expected gain of retrieval.

A head is the same kind of classifier as a gate with one target. It predicts that one of the two answers is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from knowgate.errors import BadInput
from knowgate.gates.fusion import GAIN_HEADS
from knowgate.stats.metrics import FloatArray
from knowgate.training.classifiers import C_GRID, LabeledFeatures, Tensors, fit_linear, fit_platt_scaling
from knowgate.training.examples import MIN_ROWS_PER_CLASS, Examples
from knowgate.training.probe import predict_out_of_fold


def split_into_heads(examples: Examples) -> dict[str, Examples]:
    """Return the training data of each head: 'closed' predicts wrong closed-book answers, 'open' wrong open-book ones.

    Questions without an open-book answer count with their closed-book answer, which they keep when they are retrieved.

    Raises:
        BadInput: The training split has too few right or too few wrong answers of one kind.
    """
    table = examples.table
    heads = {
        name: replace(examples, needed=~right.astype(bool))
        for name, right in zip(GAIN_HEADS, (table.closed_right, table.always_right), strict=True)
    }
    for name, head in heads.items():
        wrong = head.needed[head.split.train]
        if min(wrong.sum(), (~wrong).sum()) < MIN_ROWS_PER_CLASS:
            raise BadInput(
                f"target='gain' needs {MIN_ROWS_PER_CLASS} right and {MIN_ROWS_PER_CLASS} wrong {name}-book answers in "
                f"the training split, which has {(~wrong).sum()} and {wrong.sum()}. Label more questions, or use "
                "target='benefit'."
            )
    return heads


def fit_calibrated_linear(rows: LabeledFeatures, texts: Sequence[str]) -> Tensors:
    """Fit a logistic regression whose probabilities are calibrated, so that those of two heads can be subtracted.

    Cross-validation on the rows chooses the regularization with the lowest log loss, and its out-of-fold predictions
    fit the Platt scaling, which is folded into the weights.

    Args:
        rows: Training data with few columns.
        texts: The question of each row; equal questions share a fold.
    """
    predictions = {c: predict_out_of_fold(rows, texts, c) for c in C_GRID}
    strength = min(C_GRID, key=lambda c: compute_log_loss(rows, predictions[c]))
    tensors = fit_linear(rows.features, rows.needed, strength)
    platt = fit_platt_scaling(predictions[strength], rows.needed)
    if platt["kind"] == "platt":
        tensors["0.0.weight"] = (platt["a"] * tensors["0.0.weight"]).astype(np.float32)
        tensors["0.0.bias"] = (platt["a"] * tensors["0.0.bias"] + platt["b"]).astype(np.float32)
    return tensors


def compute_log_loss(rows: LabeledFeatures, needs: FloatArray) -> float:
    """Return the mean log loss of predicted probabilities."""
    likelihood = np.clip(np.where(rows.needed, needs, 1 - needs), 1e-12, 1.0)
    return float(-np.log(likelihood).mean())
