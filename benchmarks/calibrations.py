"""Platt's calibration against isotonic regression on the recorded runs: why `fitting.probability` has the former.

    python -m benchmarks.calibrations

Two LLMs, six data sets, three raw scores (two log-probability gates and a logistic regression over the draft's tokens),
calibrated on the train run, measured on the test run; with all train rows and with 300 of them. No LLM is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from benchmarks.tables.common import DATA, MODELS, RUNS

FEATURES = ["first", "mean", "min", "entropy", "margin"]
FEW = 300
Map = Callable[[Any], Any]


def isotonic(raw: Any, needed: Any) -> Map:
    fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(raw, needed.astype(float))
    return lambda new: np.interp(new, fitted.X_thresholds_, fitted.y_thresholds_)


def platt(raw: Any, needed: Any) -> Map:
    from knowgate.gates.artifacts.networks import apply_calibration
    from knowgate.training.classifiers import fit_platt_scaling

    fitted = fit_platt_scaling(raw, needed)
    return lambda new: apply_calibration(new, fitted)


def scores(train: Any, test: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(raw scores to calibrate on, what was needed there, raw scores of the test run)"""
    from knowgate.data.signals.features import feature_matrix
    from knowgate.gates.offline_scoring import score_gate

    unknown = ~train.closed_right
    for gate in ("logprob:first", "logprob:min"):
        yield score_gate(train, gate).needs, unknown, score_gate(test, gate).needs
    seen, new = (feature_matrix(FEATURES, one.questions, one.readings) for one in (train, test))
    half = len(unknown) // 2
    mean, spread = seen[:half].mean(axis=0), seen[:half].std(axis=0) + 1e-6
    model = LogisticRegression(C=0.1, class_weight="balanced", max_iter=1000)
    model.fit((seen[:half] - mean) / spread, unknown[:half])
    learnt, told = (model.predict_proba((part - mean) / spread)[:, 1] for part in (seen[half:], new))
    yield learnt, unknown[half:], told


def measures(needed: Any, need: Any, raw: Any) -> tuple[float, ...]:
    from sklearn.metrics import brier_score_loss, roc_auc_score

    bins = np.minimum((need * 10).astype(int), 9)
    errors = [(bins == one).mean() * abs(needed[bins == one].mean() - need[bins == one].mean()) for one in set(bins)]
    kept = len(set(np.round(need, 6))) / len(set(np.round(raw, 6)))
    return roc_auc_score(needed, need), float(sum(errors)), brier_score_loss(needed, need), kept


def main() -> None:
    from knowgate.data.runs.table import load_label_table

    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for model in MODELS:
        for name in DATA:
            train, test = (load_label_table([RUNS / model / f"{name}-{part}"], layers=()) for part in ("train", "test"))
            unknown = ~test.closed_right
            for raw, needed, new in scores(train, test):
                order = np.random.default_rng(0).permutation(len(raw))
                for rows, places in (("all rows", order), (f"{FEW} rows", order[:FEW])):
                    if 0 < needed[places].sum() < len(places) and 0 < unknown.sum() < len(unknown):
                        for kind, fit in (("platt", platt), ("isotonic", isotonic)):
                            need = fit(raw[places], needed[places])(new)
                            found.setdefault((rows, kind), []).append(measures(unknown, need, new))
    for (rows, kind), values in found.items():
        area, error, brier, kept = np.mean(values, axis=0)
        ranked = f"AUROC {area:.3f}, distinct {kept:.0%}"
        print(f"{rows}, {kind}, {len(values)} scores: ECE {error:.3f}, Brier {brier:.4f}, {ranked}")


if __name__ == "__main__":
    main()
