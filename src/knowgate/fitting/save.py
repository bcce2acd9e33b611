"""From a fitted score to an artefact: calibrate, measure on the held-out test split, write the folder with its card."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from knowgate.display import GREY, Axis, Curve, Frame, Point, line_chart
from knowgate.fitting.card import card
from knowgate.fitting.examples import Examples
from knowgate.fitting.fit_result import FitResult
from knowgate.fitting.probability import fit_calibration
from knowgate.gates import (
    SEEN,
    Tensors,
    measure_ground,
    read_off,
    reference_files,
    retrieval_rule,
    to_probability,
    what_it_reads,
    write_artefact,
)
from knowgate.runs import cautions, count_synthetic
from knowgate.statistics import Estimate, Floats, estimate_auroc, estimate_quality
from knowgate.thresholds import NEVER, Outcomes, ThresholdResult, for_loss, try_threshold
from knowgate.types import Want

MAX_LOSS = 0.01  # accuracy that the default threshold may lose against always retrieving: one point
NOTHING_GAINED = (
    "on the dev and calibration questions never retrieving loses no more than that, so the gate never retrieves: fit "
    "it on more questions, or choose a threshold on others with knowgate calibrate"
)


@dataclass(frozen=True)
class FitReport:
    """What came out: measures on the test split, in print and in the card."""

    path: Path
    manifest: dict[str, Any]
    metrics: dict[str, Estimate]

    @property
    def rule(self) -> str:
        """When the gate retrieves, in words."""
        return retrieval_rule(self.manifest["threshold"])


def save_fitted(
    fitted: FitResult,
    examples: Examples,
    out: Path,
    *,
    command: str = "",
    threshold: float | None = None,
    max_loss: float | None = None,
    keep_questions: bool = True,
) -> FitReport:
    """Calibrate on the calibration split, measure on the test split, write the folder whole.

    threshold: None for 0.5, or, where need is the probability that retrieval helps, for what retrieves least and loses
    at most `max_loss` (one point) on the dev and calibration questions (`thresholds.choice`): helping is rarer than one
    in two, so 0.5 would hardly ever retrieve. keep_questions: ten of them lie in the folder with their states.
    """
    split = examples.split
    counts = examples.weights_of(split.calibration)
    raw = fitted.raw(split.calibration.tolist())
    calibration = fit_calibration(raw, examples.needed[split.calibration], weights=counts)
    needs = to_probability(fitted.raw(split.test.tolist()), calibration) if len(split.test) else np.empty(0)
    truth = examples.needed[split.test]
    metrics = estimate_quality(truth, needs)
    default = _threshold(fitted, examples, calibration, max_loss)
    chosen = default.threshold if threshold is None else threshold
    told = default.notes if threshold is None else []
    reference = reference_files(examples.questions, examples.readings, fitted.want.layers if keep_questions else ())
    manifest = {
        **describe(replace(fitted, notes=[*fitted.notes, *told]), examples),
        "distance": what_it_reads(fitted.want.layers),
        **({"reference": True} if reference else {}),
        "calibration": calibration,
        "metrics": {name: asdict(value) for name, value in metrics.items()},
        "threshold": chosen,
        "test_rate": float(truth.mean()) if len(truth) else None,
        **_by_set(examples, needs),
    }
    text = card(manifest, manifest["notes"], command)
    seen = ("\n".join(examples.seen(fitted.learnt_all)) + "\n").encode()
    files = {**fitted.files, **reference, SEEN: seen, "curve.svg": curve(truth, needs).encode()}
    write_artefact(out, manifest, {**fitted.tensors, **_ground(manifest["distance"], examples)}, text, files)
    return FitReport(out, manifest, metrics)


def _by_set(examples: Examples, needs: Floats) -> dict[str, Any]:
    """How the gate does on each label run's part of the test split, where there are several."""
    test = examples.split.test
    names = [examples.sets[place] for place in test]
    if len(set(examples.sets)) < 2:
        return {}
    found = {}
    for name in dict.fromkeys(examples.sets):
        inside = np.array([other == name for other in names], dtype=bool)
        truth = examples.needed[test][inside]
        auroc = asdict(estimate_auroc(truth, needs[inside]))
        found[name] = {"n": len(truth), "base_rate": float(truth.mean()) if len(truth) else None, "auroc": auroc}
    return {"sets": found, "balanced": examples.balanced}


def _ground(source: Mapping[str, Any], examples: Examples) -> Tensors:
    """What the questions were like: those learnt from, with the others to say how far such questions lie apart."""
    found, split = read_off(source, examples.questions, examples.readings), examples.split
    others = np.concatenate([split.dev, split.calibration, split.test])
    learnt = split.train if len(split.train) else others
    return measure_ground(found[learnt], found[others if len(others) else learnt])


class DefaultThreshold(NamedTuple):
    """A threshold nobody asked for, and what it will do, in words."""

    threshold: float
    notes: list[str]


def _threshold(
    fitted: FitResult, examples: Examples, calibration: Mapping[str, Any], max_loss: float | None
) -> DefaultThreshold:
    """0.5 for a probability of not knowing; for one of retrieval helping, what `for_loss` chooses."""
    chosen_on = np.concatenate([examples.split.dev, examples.split.calibration])
    if examples.target != "benefit" or not len(chosen_on):
        return DefaultThreshold(0.5, [])
    most = MAX_LOSS if max_loss is None else max_loss
    trial, needs = examples.trial, to_probability(fitted.raw(chosen_on.tolist()), calibration)
    outcomes = Outcomes(needs, trial.closed_right[chosen_on], trial.always_right[chosen_on])
    threshold = for_loss(outcomes, most)
    notes = [in_words(try_threshold(outcomes, threshold), most)]
    return DefaultThreshold(threshold, notes + [NOTHING_GAINED] * (threshold == NEVER))


def counted(share: float) -> str:
    return f"{100 * share:g} point" + ("" if share == MAX_LOSS else "s")


def in_words(result: ThresholdResult, most: float) -> str:
    """What a threshold that was chosen by a largest loss will do."""
    lost = f"loses {100 * result.loss:.1f}" if result.loss >= 0 else f"gains {-100 * result.loss:.1f}"
    return (
        f"its threshold retrieves least among those that lose at most {counted(most)} of accuracy: on the "
        f"{result.n} dev and calibration questions it spares {1 - result.rate:.0%} of the searches and {lost} points "
        f"({result.accuracy:.1%} right, always retrieving {result.right_always / result.n:.1%}); that is no guarantee, "
        "which knowgate calibrate --max-loss gives"
    )


def _unusual(want: Want) -> dict[str, Any]:
    """What is not as it would be anyway; how samples are drawn stands beside the rest, as `label` keeps it."""
    usual, own = ({**one.pop("sampling"), **one} for one in (asdict(Want()), asdict(want)))
    return {key: value for key, value in own.items() if value != usual[key]}


def describe(fitted: FitResult, examples: Examples) -> dict[str, Any]:
    """Everything the gate is bound to."""
    settings = examples.settings
    return {
        "gate": fitted.gate,
        "options": dict(fitted.options),
        "needs": sorted(fitted.needs),
        "want": {**_unusual(fitted.want), "layers": list(fitted.want.layers)},
        "target": examples.target,
        "model": {"name": settings["model"], "fingerprint": settings["model_fingerprint"]},
        "prompts": settings["prompts_fingerprint"],
        "retriever": settings.get("retriever_fingerprint"),
        "grader": settings["grader"],
        "data": [{"run": Path(run).name} for run in examples.runs],
        "data_hash": settings["data_fingerprint"],
        "split": examples.split.sizes(),
        "base_rate": float(examples.needed.mean()),
        "created": time.strftime("%Y-%m-%d", time.gmtime()),
        "synthetic": count_synthetic(examples.rows),
        "notes": [*fitted.notes, *cautions(examples.rows)],
    }


def curve(needed: Any, needs: Floats) -> str:
    """The ROC curve as a small SVG picture."""
    order = np.argsort(-needs, kind="stable")
    hits = np.concatenate([[0], np.cumsum(needed[order])])
    falls = np.concatenate([[0], np.cumsum(~needed[order])])
    x, y = falls / max(1, falls[-1]), hits / max(1, hits[-1])
    points = [Point(float(a), float(b)) for a, b in zip(x, y, strict=True)]
    chance = Curve("chance", [Point(0, 0), Point(1, 1)], GREY, dashed=True)
    frame = Frame(Axis("needless retrievals"), Axis("needed retrievals found"), width=260, height=260)
    return line_chart([chance, Curve("the gate", points)], frame)
