"""Evaluate cascades from predictions: choose thresholds on dev rows, measure them on test rows, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.judge_answers import Answers, Bools, Floats, Judge, SplitPredictions
from knowgate.gates.calibration.threshold_choice import choose_for_rate
from knowgate.stats.bootstrap import Bootstrap, Estimate, summarize_resamples
from knowgate.stats.metrics import auroc, weighted_mean
from knowgate.stats.proportions import mcnemar_test

RATES = (0.9, 0.8, 0.7, 0.6, 0.5)
RATE_TOLERANCE = 0.02  # largest difference between the retrieval rate on test rows and the target rate
RESAMPLES = 2_000
RECORDED_RATE = 0.6  # target retrieval rate of the threshold that is written to a label run


@dataclass(frozen=True)
class Point:
    """A policy measured on the test rows.

    Attributes:
        target_rate: Retrieval rate that the threshold was chosen for.
        threshold: Need above which the policy retrieves.
        rate: Retrieval rate on the test rows.
        accuracy: Share of right answers.
        against_always: Accuracy minus the accuracy of always retrieving.
        p: P value of McNemar's test against always retrieving.
        gained: Number of questions that only this policy answers right.
        lost: Number of questions that only always retrieving answers right.
        rule: Kind of need that is compared with the threshold: "known" or "gain".
    """

    target_rate: float
    threshold: float
    rate: float
    accuracy: Estimate
    against_always: Estimate
    p: float
    gained: int
    lost: int
    rule: str = ""

    @property
    def is_close(self) -> bool:
        """Whether the rate on the test rows is near the target rate."""
        return abs(self.rate - self.target_rate) <= RATE_TOLERANCE


def compute_needs(predictions: SplitPredictions, rule: str) -> Floats:
    """Return the need for retrieval of each row, from 0 to 1.

    Args:
        predictions: Predictions for the rows.
        rule: "known" for 1 - P(the closed-book answer is right); "gain" for the expected gain from documents, scaled.
    """
    known = predictions.columns["known"]
    return (predictions.columns["found"] - known + 1) / 2 if rule == "gain" else 1 - known


def list_rules(judge: Judge) -> list[str]:
    """Return the kinds of need that the predictions allow."""
    return ["known", "gain"] if "found" in judge.dev.columns else ["known"]


def right_after_retrieval(predictions: SplitPredictions, arbiter: str) -> Bools:
    """Return whether the final answer is right if every question is retrieved for.

    Args:
        predictions: Predictions for the rows.
        arbiter: What chooses between the two answers: "judge", "rules", or "none" for the answer with retrieval.
    """
    answers = predictions.answers
    if arbiter == "judge":
        return predictions.arbiter_right
    if arbiter == "rules":
        return np.where(answers.rules_prefer_closed_book, answers.closed, answers.open)
    return answers.open


def best_rule(judge: Judge, arbiter: str, rate: float) -> str:
    """Return the rule whose cascade has the highest accuracy at this rate on dev rows."""
    return max(list_rules(judge), key=lambda rule: _dev_accuracy(judge, rule, arbiter, rate))


def _dev_accuracy(judge: Judge, rule: str, arbiter: str, rate: float) -> float:
    """Return the accuracy of a cascade on dev rows."""
    needs = compute_needs(judge.dev, rule)
    retrieve = needs > choose_for_rate(needs, rate)
    return float(np.where(retrieve, right_after_retrieval(judge.dev, arbiter), judge.dev.answers.closed).mean())


def cascade_points(judge: Judge, arbiter: str, rule: str | None = None) -> list[Point]:
    """Measure the cascade on test rows at every rate in `RATES`, with thresholds chosen on dev rows.

    Args:
        judge: Predictions of the judge and the arbiter.
        arbiter: As in `right_after_retrieval`.
        rule: Kind of need; by default the best on dev rows at each rate.
    """
    return [_measure_cascade(judge, arbiter, rule or best_rule(judge, arbiter, rate), rate) for rate in RATES]


def _measure_cascade(judge: Judge, arbiter: str, rule: str, rate: float) -> Point:
    threshold = choose_for_rate(compute_needs(judge.dev, rule), rate)
    retrieve = compute_needs(judge.test, rule) > threshold
    right = np.where(retrieve, right_after_retrieval(judge.test, arbiter), judge.test.answers.closed)
    return replace(make_point(right, judge.test.answers, rate, threshold, float(retrieve.mean())), rule=rule)


def make_point(
    right: Bools, answers: Answers, target_rate: float = 1.0, threshold: float = -1.0, rate: float = 1.0
) -> Point:
    """Return the accuracy of a policy with intervals, compared with always retrieving.

    Args:
        right: Whether the policy's answer is right, per row.
        answers: Graded answers of the same rows.
        target_rate: Retrieval rate that the threshold was chosen for.
        threshold: Need above which the policy retrieves.
        rate: Retrieval rate on these rows.
    """
    means = resample_means({"accuracy": right, "always": answers.open})
    p, gained, lost = mcnemar_test(right, answers.open)
    gap = summarize_resamples(means["accuracy"] - means["always"])
    return Point(target_rate, threshold, rate, summarize_resamples(means["accuracy"]), gap, p, gained, lost)


def resample_means(columns: Mapping[str, Bools]) -> dict[str, Floats]:
    """Return the mean of each column on all rows and on every bootstrap resample; all columns share the resamples."""
    table = np.stack([column.astype(float) for column in columns.values()], axis=1)
    draws = Bootstrap(len(table), RESAMPLES)
    means: dict[str, Floats] = draws.apply(
        [lambda weights: dict(zip(columns, weighted_mean(weights, table).T, strict=True))]
    )[0]
    return means


def judge_auroc(judge: Judge) -> float:
    """Return the AUROC of the predictions before retrieval on test rows."""
    return float(auroc(judge.test.answers.closed, judge.test.columns["known"]) or 0.0)


def choose_judge(judges: Mapping[str, Judge], name: str | None = None) -> Judge | None:
    """Return the predictions for the headline numbers.

    Args:
        judges: All recorded predictions.
        name: Name of the predictions; by default "cascade" if it exists, else the best cascade on dev rows.

    Returns:
        The predictions, or None if none of them can both judge and arbitrate.
    """
    if name or "cascade" in judges:
        return judges[name or "cascade"]
    candidates = [judge for judge in judges.values() if judge.dev.can_arbitrate and "known" in judge.dev.columns]
    return max(candidates, key=_mean_dev_accuracy, default=None)


def _mean_dev_accuracy(judge: Judge) -> float:
    """Return the mean accuracy of the cascade on dev rows over all rates."""
    return float(np.mean([_dev_accuracy(judge, best_rule(judge, "judge", rate), "judge", rate) for rate in RATES]))


def headline(judge: Judge, judge_alone: Judge | None = None) -> dict[str, Any]:
    """Return the headline numbers on the test rows.

    Args:
        judge: Predictions of the cascade.
        judge_alone: Predictions whose AUROC before retrieval is reported; by default those of the cascade.
    """
    answers, points = judge.test.answers, cascade_points(judge, "judge")
    return {
        "never": round(float(answers.closed.mean()), 4),
        "always": round(float(answers.open.mean()), 4),
        "oracle": round(float((answers.closed | answers.open).mean()), 4),
        "judge_auroc": round(judge_auroc(judge_alone or judge), 4),
        "rules_accuracy": round(float(right_after_retrieval(judge.test, "rules").mean()), 4),
        "arbiter_accuracy": round(float(judge.test.arbiter_right.mean()), 4),
        "cascade": {f"{point.target_rate:g}": round(point.accuracy.value or 0.0, 4) for point in points},
        "retrieval": {f"{point.target_rate:g}": round(point.rate, 4) for point in points},
        "predictions": judge.name,
        "judge": (judge_alone or judge).name,
        "cascade_auroc": round(judge_auroc(judge), 4),
        "rule": {f"{rate:g}": best_rule(judge, "judge", rate) for rate in RATES},
    }


def add_predictions_to_run(judge: Judge, run: Path, name: str = "judge") -> None:
    """Write needs and beliefs into a label run, where `knowgate eval` and `knowgate calibrate` read them.

    The threshold is chosen for `RECORDED_RATE` on dev rows.

    Args:
        judge: Predictions of the judge and the arbiter.
        run: Folder of a label run of the test split.
        name: Name of the gate and of the arbiter in the run.
    """
    from knowgate.core.files import sha256_text
    from knowgate.data.runs.records import RecordedBeliefs, RecordedNeeds, write_beliefs, write_needs

    rule, answers = best_rule(judge, "judge", RECORDED_RATE), judge.test.answers
    threshold = choose_for_rate(compute_needs(judge.dev, rule), RECORDED_RATE)
    needs = dict(zip(answers.ids, compute_needs(judge.test, rule).tolist(), strict=True))
    write_needs(run, [RecordedNeeds(name, threshold, needs, f"predictions of {judge.name}")])
    sides = {
        side: {answers.ids[index]: float(judge.test.columns[side][index]) for index in np.flatnonzero(~answers.same)}
        for side in ("closed", "open")
    }
    agreed = tuple(key for key, same in zip(answers.ids, answers.same, strict=True) if same)
    fingerprint = sha256_text(*(f"{key} {value}" for side in sides.values() for key, value in side.items()))[:16]
    write_beliefs(run, RecordedBeliefs(name, fingerprint, sides["closed"], sides["open"], agreed))
