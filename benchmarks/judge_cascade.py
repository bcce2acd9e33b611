"""Cascades from predictions: thresholds chosen on dev rows, what they come to on test rows, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.judge_answers import Answers, Bools, Floats, Judge, Predicted
from knowgate.gates.calibration.threshold_choice import choose_for_rate
from knowgate.stats.bootstrap import Bootstrap, Estimate, summarize_resamples
from knowgate.stats.metrics import auroc, weighted_mean
from knowgate.stats.proportions import mcnemar_test

RATES = (0.9, 0.8, 0.7, 0.6, 0.5)
CLOSE = 0.02  # how far the rate of a threshold on test rows may be from the one wanted
RESAMPLES = 2_000
KEPT = 0.6  # the rate of the threshold that is kept beside recorded needs


@dataclass(frozen=True)
class Point:
    """A policy on the test rows: how often it retrieves, what is right, and against always retrieving."""

    wanted: float
    threshold: float
    rate: float
    accuracy: Estimate
    against_always: Estimate
    p: float
    gained: int
    lost: int
    rule: str = ""  # what the threshold is for

    @property
    def is_close(self) -> bool:
        return abs(self.rate - self.wanted) <= CLOSE


def needs_of(predicted: Predicted, rule: str) -> Floats:
    """known: 1 - P(the answer from memory is right). gain: what documents are expected to add, from 0 to 1."""
    known = predicted.columns["known"]
    return (predicted.columns["found"] - known + 1) / 2 if rule == "gain" else 1 - known


def rules_of(judge: Judge) -> list[str]:
    return ["known", "gain"] if "found" in judge.dev.columns else ["known"]


def after(predicted: Predicted, arbiter: str) -> Bools:
    """Whether the answer after retrieval is right. arbiter: judge, rules or none."""
    answers = predicted.answers
    if arbiter == "judge":
        return predicted.given
    return np.where(answers.rules, answers.closed, answers.open) if arbiter == "rules" else answers.open


def best_rule(judge: Judge, arbiter: str, rate: float) -> str:
    """The rule whose cascade is right most often on dev rows at this rate; test rows have no say."""
    return max(rules_of(judge), key=lambda rule: _on_dev(judge, rule, arbiter, rate))


def _on_dev(judge: Judge, rule: str, arbiter: str, rate: float) -> float:
    needs = needs_of(judge.dev, rule)
    retrieve = needs > choose_for_rate(needs, rate)
    return float(np.where(retrieve, after(judge.dev, arbiter), judge.dev.answers.closed).mean())


def cascade_points(judge: Judge, arbiter: str, rule: str | None = None) -> list[Point]:
    """The cascade at every rate: threshold by dev needs, everything else on test rows."""
    return [_at_rate(judge, arbiter, rule or best_rule(judge, arbiter, rate), rate) for rate in RATES]


def _at_rate(judge: Judge, arbiter: str, rule: str, rate: float) -> Point:
    threshold = choose_for_rate(needs_of(judge.dev, rule), rate)
    return replace(_point(judge.test, needs_of(judge.test, rule), rate, threshold, arbiter), rule=rule)


def _point(test: Predicted, needs: Floats, wanted: float, threshold: float, arbiter: str) -> Point:
    retrieve = needs > threshold
    right = np.where(retrieve, after(test, arbiter), test.answers.closed)
    return point_of(right, test.answers, wanted, threshold, float(retrieve.mean()))


def point_of(right: Bools, answers: Answers, wanted: float = 1.0, threshold: float = -1.0, rate: float = 1.0) -> Point:
    found = measured({"accuracy": right, "always": answers.open})
    p, gained, lost = mcnemar_test(right, answers.open)
    gap = summarize_resamples(found["accuracy"] - found["always"])
    return Point(wanted, threshold, rate, summarize_resamples(found["accuracy"]), gap, p, gained, lost)


def measured(columns: Mapping[str, Bools]) -> dict[str, Floats]:
    """Means on the rows as they are and on every resample, the same for all columns."""
    table = np.stack([column.astype(float) for column in columns.values()], axis=1)
    draws = Bootstrap(len(table), RESAMPLES)
    found: dict[str, Floats] = draws.apply(
        [lambda weights: dict(zip(columns, weighted_mean(weights, table).T, strict=True))]
    )[0]
    return found


def judge_auroc(judge: Judge) -> float:
    return float(auroc(judge.test.answers.closed, judge.test.columns["known"]) or 0.0)


def chosen_judge(judges: Mapping[str, Judge], wanted: str | None = None) -> Judge | None:
    """The predictions the headline is made of: those named, else 'cascade', else the best cascade on dev rows."""
    if wanted or "cascade" in judges:
        return judges[wanted or "cascade"]
    able = [one for one in judges.values() if one.dev.can_choose and "known" in one.dev.columns]
    return max(able, key=_over_rates, default=None)


def _over_rates(judge: Judge) -> float:
    """What its cascade comes to on dev rows, over all rates."""
    return float(np.mean([_on_dev(judge, best_rule(judge, "judge", rate), "judge", rate) for rate in RATES]))


def headline(judge: Judge, alone: Judge | None = None) -> dict[str, Any]:
    """The numbers everything else explains. retrieval: the rates that came out on test rows.

    alone: the best judge by dev rows where no search is weighed; by default the cascade's own.
    """
    answers, points = judge.test.answers, cascade_points(judge, "judge")
    return {
        "never": round(float(answers.closed.mean()), 4),
        "always": round(float(answers.open.mean()), 4),
        "oracle": round(float((answers.closed | answers.open).mean()), 4),
        "judge_auroc": round(judge_auroc(alone or judge), 4),
        "rules_accuracy": round(float(after(judge.test, "rules").mean()), 4),
        "arbiter_accuracy": round(float(judge.test.given.mean()), 4),
        "cascade": {f"{one.wanted:g}": round(one.accuracy.value or 0.0, 4) for one in points},
        "retrieval": {f"{one.wanted:g}": round(one.rate, 4) for one in points},
        "predictions": judge.name,
        "judge": (alone or judge).name,
        "cascade_auroc": round(judge_auroc(judge), 4),
        "rule": {f"{rate:g}": best_rule(judge, "judge", rate) for rate in RATES},
    }


def keep_predictions(judge: Judge, run: Path, name: str = "judge") -> None:
    """Needs and beliefs beside the rows of a label run, so that `knowgate eval` and `calibrate` find them there.

    The threshold is that of 60 % retrieval on dev rows.
    """
    from knowgate.core.files import sha256_text
    from knowgate.data.runs.records import RecordedBeliefs, RecordedNeeds, write_beliefs, write_needs

    rule, answers = best_rule(judge, "judge", KEPT), judge.test.answers
    threshold = choose_for_rate(needs_of(judge.dev, rule), KEPT)
    needs = dict(zip(answers.ids, needs_of(judge.test, rule).tolist(), strict=True))
    write_needs(run, [RecordedNeeds(name, threshold, needs, f"predictions of {judge.name}")])
    sides = {
        side: {answers.ids[place]: float(judge.test.columns[side][place]) for place in np.flatnonzero(~answers.same)}
        for side in ("closed", "open")
    }
    agreed = tuple(key for key, same in zip(answers.ids, answers.same, strict=True) if same)
    fingerprint = sha256_text(*(f"{key} {value}" for side in sides.values() for key, value in side.items()))[:16]
    write_beliefs(run, RecordedBeliefs(name, fingerprint, sides["closed"], sides["open"], agreed))
