"""Compare Platt scaling with isotonic regression on the recorded runs: why `fit_platt_scaling` is the library's choice.

    python -m benchmarks.calibrations

The runs are those of two LLMs on six data sets. Three raw scores (two log-probability gates and a logistic regression over
the draft's token statistics) are calibrated on the train run and measured on the test run, with all train rows and with
300 of them. This runs no LLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from benchmarks.tables.common import DATA, MODELS, RUNS

FEATURES = ["first", "mean", "min", "entropy", "margin"]
FEW_ROWS = 300
Calibration = Callable[[Any], Any]


def fit_isotonic(raw: Any, needed: Any) -> Calibration:
    """Fit isotonic regression, with linear interpolation between its thresholds."""
    fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(raw, needed.astype(float))
    return lambda new: np.interp(new, fitted.X_thresholds_, fitted.y_thresholds_)


def fit_platt(raw: Any, needed: Any) -> Calibration:
    """Fit Platt scaling as the library does."""
    from knowgate.gates.artifacts.networks import apply_calibration
    from knowgate.training.classifiers import fit_platt_scaling

    scaling = fit_platt_scaling(raw, needed)
    return lambda new: apply_calibration(new, scaling)


def iterate_scores(train: Any, test: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield raw scores to calibrate on, whether retrieval was needed there, and raw scores of the test run."""
    from knowgate.data.signals.features import feature_matrix
    from knowgate.gates.offline_scoring import score_gate

    unknown = ~train.closed_book_right
    for gate in ("logprob:first", "logprob:min"):
        yield score_gate(train, gate).needs, unknown, score_gate(test, gate).needs
    train_features, test_features = (feature_matrix(FEATURES, run.questions, run.readings) for run in (train, test))
    half = len(unknown) // 2  # The regression is fitted on one half, and calibrated on the other.
    mean, deviation = train_features[:half].mean(axis=0), train_features[:half].std(axis=0) + 1e-6
    model = LogisticRegression(C=0.1, class_weight="balanced", max_iter=1000)
    model.fit((train_features[:half] - mean) / deviation, unknown[:half])
    train_scores, test_scores = (
        model.predict_proba((features - mean) / deviation)[:, 1] for features in (train_features[half:], test_features)
    )
    yield train_scores, unknown[half:], test_scores


def measure_calibration(needed: Any, need: Any, raw: Any) -> tuple[float, ...]:
    """Return AUROC, expected calibration error, Brier score and the share of distinct scores that remain distinct.

    Args:
        needed: Whether retrieval was needed, per row.
        need: Calibrated scores.
        raw: Raw scores.
    """
    from sklearn.metrics import brier_score_loss, roc_auc_score

    bins = np.minimum((need * 10).astype(int), 9)
    errors = [(bins == k).mean() * abs(needed[bins == k].mean() - need[bins == k].mean()) for k in set(bins)]
    distinct = len(set(np.round(need, 6))) / len(set(np.round(raw, 6)))
    return roc_auc_score(needed, need), float(sum(errors)), brier_score_loss(needed, need), distinct


def main() -> None:
    """Print the mean measures of both calibrations."""
    from knowgate.data.runs.table import load_label_table

    measures: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for model in MODELS:
        for name in DATA:
            train, test = (load_label_table([RUNS / model / f"{name}-{part}"], layers=()) for part in ("train", "test"))
            unknown = ~test.closed_book_right
            for raw, needed, new in iterate_scores(train, test):
                order = np.random.default_rng(0).permutation(len(raw))
                for rows, chosen in (("all rows", order), (f"{FEW_ROWS} rows", order[:FEW_ROWS])):
                    if 0 < needed[chosen].sum() < len(chosen) and 0 < unknown.sum() < len(unknown):
                        for kind, fit in (("platt", fit_platt), ("isotonic", fit_isotonic)):
                            need = fit(raw[chosen], needed[chosen])(new)
                            measures.setdefault((rows, kind), []).append(measure_calibration(unknown, need, new))
    for (rows, kind), values in measures.items():
        auroc, error, brier, distinct = np.mean(values, axis=0)
        ranking = f"AUROC {auroc:.3f}, distinct {distinct:.0%}"
        print(f"{rows}, {kind}, {len(values)} scores: ECE {error:.3f}, Brier {brier:.4f}, {ranking}")


if __name__ == "__main__":
    main()
