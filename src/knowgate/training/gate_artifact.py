"""From a fitted score to an artefact: calibrate, measure on the held-out test split, write the folder with its card."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from knowgate.core.chart import GRAY, Axis, ChartFrame, ChartPoint, Curve, render_line_chart
from knowgate.core.display import escape_markdown, escape_markdown_code
from knowgate.data.runs.caveats import count_synthetic, describe_synthetic, list_caveats
from knowgate.data.runs.folder import suggest_ask_options
from knowgate.gates.artifacts.drift import (
    build_reference_files,
    choose_distance_source,
    fit_distance,
    read_distance_features,
)
from knowgate.gates.artifacts.gate_folder import SEEN_FILE, Tensors, write_artifact
from knowgate.gates.artifacts.networks import apply_calibration
from knowgate.gates.calibration.threshold_choice import (
    NEVER_RETRIEVE,
    GateOutcomes,
    ThresholdResult,
    choose_for_loss,
    evaluate_threshold,
)
from knowgate.gates.fitted_gate import describe_retrieval_rule
from knowgate.stats.bootstrap import Estimate, estimate_auroc, estimate_quality
from knowgate.stats.metrics import FloatArray
from knowgate.training.classifiers import fit_platt_scaling
from knowgate.training.examples import Examples
from knowgate.training.fit_function import FitResult
from knowgate.types import SignalRequest

METRIC_NAMES = {
    "auroc": "AUROC (ranks questions that need retrieval above those that do not; .5 is chance)",
    "auprc": "area under precision-recall",
    "accuracy": "accuracy of need above 0.5 as a verdict, whatever the gate's threshold",
    "ece": "expected calibration error (0 is perfect)",
    "brier": "Brier score (0 is perfect)",
}

TARGET_MEANINGS = {
    "known": "the LLM does not know the answer",
    "benefit": "retrieval turns a wrong answer right",
    "agree": "the LLM says something else once it has passages",
}


def render_gate_card(manifest: Mapping[str, Any], notes: Sequence[str], command: str) -> str:
    """Markdown with data, splits, measures with intervals, and how to use it."""
    parts = [
        f"# {manifest['gate']} gate for {escape_markdown(manifest['model']['name'])}",
        f"A knowgate gate, fitted {manifest['created']}. Its need is a calibrated probability that "
        f"{TARGET_MEANINGS[manifest['target']]}.",
        *_synthetic(manifest),
        f'```console\nknowgate ask --gate THIS_FOLDER{_model(manifest)} --docs FOLDER "a question"\n```',
        _facts(manifest),
        "## Measured on the held-out test split\n\n" + _metrics(manifest),
        *_sets(manifest),
        "![ROC curve on the test split](curve.svg)",
    ]
    if notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {escape_markdown(note)}" for note in notes))
    if command:
        parts.append(f"## Made by\n\n```console\n{escape_markdown_code(command)}\n```")
    return "\n\n".join(parts) + "\n"


def _model(manifest: Mapping[str, Any]) -> str:
    return suggest_ask_options(manifest["model"]["name"])


def _synthetic(manifest: Mapping[str, Any]) -> list[str]:
    """First of all: that nobody ever asked what it was fitted on."""
    words = describe_synthetic(manifest.get("synthetic", 0), sum(manifest["split"].values()))
    return [f"**{words}**"] if words else []


def _sets(manifest: Mapping[str, Any]) -> list[str]:
    """What the pooled label runs come to one by one."""
    if "sets" not in manifest:
        return []
    how = "each run counted the same in the fit" if manifest["balanced"] else "every question counted the same"
    lines = [f"By label run ({how}):", "", "| run | n | positive | AUROC | 95 % interval |", "|---|---|---|---|---|"]
    for name, one in manifest["sets"].items():
        share = "" if one["base_rate"] is None else f"{one['base_rate']:.0%}"
        lines.append(f"| {escape_markdown(name)} | {one['n']} | {share} | {' | '.join(_cells(one['auroc']))} |")
    return ["\n".join(lines)]


def _cells(estimate: Mapping[str, float | None]) -> tuple[str, str]:
    if estimate["value"] is None:
        return "not defined", ""
    interval = "" if estimate["low"] is None else f"{estimate['low']:.3f} to {estimate['high']:.3f}"
    return f"{estimate['value']:.3f}", interval


def _facts(manifest: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{name} {count}" for name, count in manifest["split"].items())
    rows = [
        ("model", f"{manifest['model']['name']} ({manifest['model']['fingerprint']})"),
        ("prompts", manifest["prompts"]),
        ("label runs", ", ".join(item["run"] for item in manifest["data"])),
        ("graded by", manifest["grader"]),
        ("questions", f"{sizes}; {manifest['base_rate']:.0%} of them positive"),
        ("needs", ", ".join(manifest["needs"]) or "nothing of the LLM"),
        ("options", _options(manifest["options"])),
        ("calibration", manifest["calibration"]["kind"]),
        ("retrieves, as fitted", describe_retrieval_rule(float(manifest["threshold"]))),
        ("kept beside it", "ten of the questions, with their hidden states" if manifest.get("reference") else ""),
    ]
    return "| | |\n|---|---|\n" + "\n".join(
        f"| {name} | {escape_markdown(str(value))} |" for name, value in rows if value
    )


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items() if not isinstance(value, list))


def majority_accuracy(manifest: Mapping[str, Any]) -> float:
    """How often the commoner verdict is right on the test split: what the accuracy of a verdict must beat."""
    share = manifest["base_rate"] if manifest.get("test_rate") is None else manifest["test_rate"]
    return max(float(share), 1 - float(share))


def _metrics(manifest: Mapping[str, Any]) -> str:
    lines = ["| measure | value | 95 % interval |", "|---|---|---|"]
    for name, estimate in manifest["metrics"].items():
        lines.append(f"| {METRIC_NAMES[name]} | {' | '.join(_cells(estimate))} |")
        if name == "accuracy":
            lines.append(
                f"| the same of the commoner verdict for every question | {majority_accuracy(manifest):.3f} | |"
            )
    return "\n".join(lines)


DEFAULT_FIT_MAX_LOSS = 0.01  # accuracy that the default threshold may lose against always retrieving: one point
NEVER_RETRIEVES_NOTE = (
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
        return describe_retrieval_rule(self.manifest["threshold"])


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
    calibration = fit_platt_scaling(raw, examples.needed[split.calibration], weights=counts)
    needs = apply_calibration(fitted.raw(split.test.tolist()), calibration) if len(split.test) else np.empty(0)
    truth = examples.needed[split.test]
    metrics = estimate_quality(truth, needs)
    default = _threshold(fitted, examples, calibration, max_loss)
    chosen = default.threshold if threshold is None else threshold
    told = default.notes if threshold is None else []
    reference = build_reference_files(
        examples.questions, examples.readings, fitted.want.layers if keep_questions else ()
    )
    manifest = {
        **build_gate_manifest(replace(fitted, notes=[*fitted.notes, *told]), examples),
        "distance": choose_distance_source(fitted.want.layers),
        **({"reference": True} if reference else {}),
        "calibration": calibration,
        "metrics": {name: asdict(value) for name, value in metrics.items()},
        "threshold": chosen,
        "test_rate": float(truth.mean()) if len(truth) else None,
        **_by_set(examples, needs),
    }
    text = render_gate_card(manifest, manifest["notes"], command)
    seen = ("\n".join(examples.seen(fitted.learnt_all)) + "\n").encode()
    files = {**fitted.files, **reference, SEEN_FILE: seen, "curve.svg": draw_roc_curve(truth, needs).encode()}
    write_artifact(out, manifest, {**fitted.tensors, **_ground(manifest["distance"], examples)}, text, files)
    return FitReport(out, manifest, metrics)


def _by_set(examples: Examples, needs: FloatArray) -> dict[str, Any]:
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
    found, split = read_distance_features(source, examples.questions, examples.readings), examples.split
    others = np.concatenate([split.dev, split.calibration, split.test])
    learnt = split.train if len(split.train) else others
    return fit_distance(found[learnt], found[others if len(others) else learnt])


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
    most = DEFAULT_FIT_MAX_LOSS if max_loss is None else max_loss
    trial, needs = examples.trial, apply_calibration(fitted.raw(chosen_on.tolist()), calibration)
    outcomes = GateOutcomes(needs, trial.closed_right[chosen_on], trial.always_right[chosen_on])
    threshold = choose_for_loss(outcomes, most)
    notes = [describe_threshold(evaluate_threshold(outcomes, threshold), most)]
    return DefaultThreshold(threshold, notes + [NEVER_RETRIEVES_NOTE] * (threshold == NEVER_RETRIEVE))


def format_points(share: float) -> str:
    return f"{100 * share:g} point" + ("" if share == DEFAULT_FIT_MAX_LOSS else "s")


def describe_threshold(result: ThresholdResult, most: float) -> str:
    """What a threshold that was chosen by a largest loss will do."""
    lost = f"loses {100 * result.loss:.1f}" if result.loss >= 0 else f"gains {-100 * result.loss:.1f}"
    return (
        f"its threshold retrieves least among those that lose at most {format_points(most)} of accuracy: on the "
        f"{result.n} dev and calibration questions it spares {1 - result.rate:.0%} of the searches and {lost} points "
        f"({result.accuracy:.1%} right, always retrieving {result.right_always / result.n:.1%}); that is no guarantee, "
        "which knowgate calibrate --max-loss gives"
    )


def _unusual(want: SignalRequest) -> dict[str, Any]:
    """What is not as it would be anyway; how samples are drawn stands beside the rest, as `label` keeps it."""
    usual, own = ({**one.pop("sampling"), **one} for one in (asdict(SignalRequest()), asdict(want)))
    return {key: value for key, value in own.items() if value != usual[key]}


def build_gate_manifest(fitted: FitResult, examples: Examples) -> dict[str, Any]:
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
        "notes": [*fitted.notes, *list_caveats(examples.rows)],
    }


def draw_roc_curve(needed: Any, needs: FloatArray) -> str:
    """The ROC curve as a small SVG picture."""
    order = np.argsort(-needs, kind="stable")
    hits = np.concatenate([[0], np.cumsum(needed[order])])
    falls = np.concatenate([[0], np.cumsum(~needed[order])])
    x, y = falls / max(1, falls[-1]), hits / max(1, hits[-1])
    points = [ChartPoint(float(a), float(b)) for a, b in zip(x, y, strict=True)]
    chance = Curve("chance", [ChartPoint(0, 0), ChartPoint(1, 1)], GRAY, dashed=True)
    frame = ChartFrame(Axis("needless retrievals"), Axis("needed retrievals found"), width=260, height=260)
    return render_line_chart([chance, Curve("the gate", points)], frame)
