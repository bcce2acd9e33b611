"""Fit the features arbiter, and choose between it, the rules and a LoRA arbiter by predictions out of fold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from knowgate.data.splits import Split
from knowgate.gates.arbiters import features as arbiter_features
from knowgate.gates.arbiters.fitted_arbiter import estimate_by_rules
from knowgate.gates.artifacts.networks import apply_network
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.training.arbiter_pairs import AnswerPairs, ArbiterResult
from knowgate.training.classifiers import Tensors, check_finite, fit_linear
from knowgate.training.judges.ensemble import assign_folds


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


AUTO_FOLDS = 5
FitPairs = Callable[[AnswerPairs, int], ArbiterResult]  # fits an arbiter on pairs, for the fold with this number


def fit_rules_arbiter(pairs: AnswerPairs) -> ArbiterResult:
    """Return the rules as an arbiter; nothing is learned."""

    def raw(indices: Sequence[int]) -> FloatArray:
        return estimate_by_rules([pairs.answers[index] for index in indices])

    return ArbiterResult("fitted-rules", {}, frozenset(), wants_passages=False, raw=raw, is_calibrated=True)


@dataclass(frozen=True)
class ArbiterComparison:
    """Right answers of the rules and of a trained arbiter on questions that it was not trained on.

    Attributes:
        mode: Mode of the trained arbiter.
        rules_right: Whether the answer that the rules choose is right, for each question.
        trained_right: The same for the trained arbiter.
    """

    mode: str
    rules_right: BoolArray
    trained_right: BoolArray

    @property
    def is_trained_better(self) -> bool:
        """Whether the trained arbiter is better than the rules by more than one standard error."""
        gain = self.trained_right.astype(float) - self.rules_right
        return bool(gain.mean() > gain.std() / np.sqrt(len(gain)))

    def describe(self) -> str:
        """Say how many answers are right with each."""
        rules, trained = self.rules_right.mean(), self.trained_right.mean()
        verdict = "so it is used" if self.is_trained_better else "so the rules, which cost nothing, are used"
        return (
            f"out of fold on {len(self.rules_right)} questions: rules {rules:.1%} right, {self.mode} {trained:.1%} "
            f"({100 * (trained - rules):+.1f} points), {verdict}"
        )


def compare_with_rules(pairs: AnswerPairs, mode: str, fit: FitPairs, seed: int = 0) -> ArbiterComparison:
    """Compare a trained arbiter with the rules on the train, dev and calibration rows, by cross-validation.

    Args:
        pairs: The pairs of answers.
        mode: Mode of the trained arbiter.
        fit: Fits it.
        seed: Seed of the folds.
    """
    split = pairs.split
    rows = np.sort(np.concatenate([split.train, split.dev, split.calibration]))
    folds = assign_folds([pairs.answers[row].question.text for row in rows.tolist()], AUTO_FOLDS, seed)
    takes_closed = np.zeros(len(pairs.answers), dtype=bool)
    for fold in range(AUTO_FOLDS):
        parts = {
            name: np.intersect1d(getattr(split, name), rows[folds != fold]) for name in ("train", "dev", "calibration")
        }
        result = fit(replace(pairs, split=Split(**parts, test=rows[folds == fold])), fold)
        takes_closed[rows[folds == fold]] = _take_closed(result.raw(rows[folds == fold].tolist()))
    by_rules = _take_closed(estimate_by_rules(pairs.answers))
    right = [_choose_right(pairs, choice)[rows] for choice in (by_rules, takes_closed)]
    return ArbiterComparison(mode, *right)


def _take_closed(beliefs: FloatArray) -> BoolArray:
    """Return for which rows the closed-book answer is more likely to be right."""
    chosen: BoolArray = beliefs[:, 0] > beliefs[:, 1]
    return chosen


def _choose_right(pairs: AnswerPairs, takes_closed: BoolArray) -> BoolArray:
    """Return which questions are answered right with these choices; equal answers are not chosen between."""
    return np.where(takes_closed & pairs.differ, pairs.closed_right, pairs.open_right)
