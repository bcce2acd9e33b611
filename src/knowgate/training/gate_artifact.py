"""Finish a trained gate: calibrate its scores, measure it on the test split, and write its folder and model card."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knowgate.core.chart import GRAY, Axis, ChartFrame, ChartPoint, Curve, render_line_chart
from knowgate.core.display import escape_markdown
from knowgate.data.runs.columns import describe_synthetic, list_caveats
from knowgate.data.runs.records import name_runs
from knowgate.gates.artifacts import drift
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE, SEEN_FILE, Tensors, write_artifact
from knowgate.gates.artifacts.networks import apply_calibration
from knowgate.gates.baselines import CONSTANT_GATE
from knowgate.gates.calibration import threshold_choice
from knowgate.gates.fitted_gate import describe_retrieval_rule
from knowgate.stats.bootstrap import estimate_auroc, estimate_quality
from knowgate.stats.metrics import FloatArray
from knowgate.training import model_card
from knowgate.training.classifiers import fit_platt_scaling
from knowgate.training.examples import Examples, list_seen_keys
from knowgate.training.fit_function import FitResult
from knowgate.types import SignalRequest

NEVER_RETRIEVES_NOTE = "never retrieving stays within the allowed loss on these questions, so the gate never retrieves"
NOT_CALIBRATED_NOTE = (
    "not calibrated: the label runs have no answers with passages, so the loss from skipping a search is unknown. "
    "Its threshold is 0.5; choose one with knowgate calibrate"
)
METRIC_NAMES = {
    "auroc": "AUROC (ranks questions that need retrieval above those that do not; .5 is chance)",
    "auprc": "area under the precision-recall curve",
    "accuracy": "accuracy of need above 0.5, whatever the gate's threshold",
    "ece": "expected calibration error (0 is perfect)",
    "brier": "Brier score (0 is perfect)",
}
TARGET_MEANINGS = {
    "known": "the LLM does not know the answer",
    "benefit": "retrieval turns a wrong answer right",
    "gain": "retrieval turns a wrong answer right, ranked by the expected gain",
    "agree": "the LLM gives another answer once it has passages",
}


def save_fitted(
    result: FitResult,
    examples: Examples,
    out: Path,
    *,
    command: str = "",
    threshold: float | None = None,
    max_loss: float | None = None,
    keep_questions: bool = True,
) -> dict[str, Any]:
    """Calibrate a trained gate, measure it on the test split, and write its folder.

    Args:
        result: The trained gate.
        examples: The data it was trained on.
        out: Folder to write.
        command: The command line that the card shows.
        threshold: Retrieve if the calibrated score is above it. Default: the threshold that saves the most searches but
            loses few right answers (see `SafetyLimits`) on questions outside the training; 0.5 for label runs without
            answers with passages.
        max_loss: Maximum net loss of the default threshold, as a share of the questions: lost minus gained right answers,
            compared with always retrieving. Default: 0.01.
        keep_questions: Store ten questions with their hidden states.

    Returns:
        The manifest, without the checksums that are added when it is written.
    """
    calibration_rows = examples.split.calibration
    calibration = fit_platt_scaling(result.raw(calibration_rows.tolist()), examples.needed[calibration_rows])
    needs = _score_test_questions(result, examples, calibration)
    metrics = estimate_quality(examples.needed[examples.split.test], needs)
    default = _choose_default_threshold(result, examples, calibration, max_loss)
    if threshold is None:
        threshold = default.threshold
        result = replace(result, notes=[*result.notes, *default.notes])
    manifest = {
        **build_gate_manifest(result, examples),
        "distance": drift.choose_distance_source(result.request.layers),
        "calibration": calibration,
        "metrics": {name: asdict(estimate) for name, estimate in metrics.items()},
        "threshold": threshold,
        "calibrated": default.is_calibrated,
        **_measure_test_answers(examples, needs, threshold),
    }
    stored_layers = result.request.layers if keep_questions else ()
    reference_files = drift.build_reference_files(examples.questions, examples.readings, stored_layers)
    if reference_files:
        manifest["reference"] = True
    files = {**result.files, **reference_files, **_make_evaluation_files(result, examples, needs)}
    tensors = {**result.tensors, **_fit_distance(manifest["distance"], examples)}
    write_artifact(out, manifest, tensors, render_gate_card(manifest, command), files)
    return manifest


def _score_test_questions(result: FitResult, examples: Examples, calibration: Mapping[str, Any]) -> FloatArray:
    """Return the calibrated need for retrieval of each test question."""
    test = examples.split.test.tolist()
    return apply_calibration(result.raw(test), calibration) if test else np.empty(0)


def _measure_test_answers(examples: Examples, needs: FloatArray, threshold: float) -> dict[str, Any]:
    """Return the fields of the manifest about the test questions: right answers, base rate, and results by run."""
    needed = examples.needed[examples.split.test]
    return {
        **_count_test_answers(examples, needs, threshold),
        "test_rate": float(needed.mean()) if len(needed) else None,
        **_measure_by_run(examples, needs),
    }


def _make_evaluation_files(result: FitResult, examples: Examples, needs: FloatArray) -> dict[str, bytes]:
    """Make the list of seen questions and the ROC curve, by file name."""
    seen_keys = list_seen_keys(examples.questions, examples.split, result.uses_test_split)
    curve = draw_roc_curve(examples.needed[examples.split.test], needs)
    return {SEEN_FILE: ("\n".join(seen_keys) + "\n").encode(), "curve.svg": curve.encode()}


def build_gate_manifest(result: FitResult, examples: Examples) -> dict[str, Any]:
    """Build the fields of the manifest about the gate and its training data."""
    return {
        "gate": result.gate,
        "options": dict(result.options),
        "needs": sorted(result.needs),  # kinds of signals that the LLM must offer
        # The signals to read for each question, with their settings.
        "want": {**_list_changed_fields(result.request), "layers": list(result.request.layers)},
        "target": examples.target,
        **model_card.describe_training_data(examples.table, examples.split),
        "base_rate": float(examples.needed.mean()),
        "synthetic": sum(row.is_synthetic for row in examples.rows),
        "notes": [*result.notes, *list_caveats(examples.rows)],
    }


def _list_changed_fields(request: SignalRequest) -> dict[str, Any]:
    """Return the fields of a request that differ from the defaults.

    Fields of `request.sampling` are moved to the top level.
    """
    fields, defaults = asdict(request), asdict(SignalRequest())
    fields = {**fields.pop("sampling"), **fields}
    defaults = {**defaults.pop("sampling"), **defaults}
    return {name: value for name, value in fields.items() if value != defaults[name]}


def _measure_by_run(examples: Examples, needs: FloatArray) -> dict[str, Any]:
    """Measure the gate on the test questions of each label run.

    Args:
        examples: The label rows, with whether each question needs retrieval.
        needs: The need for retrieval that the gate predicts for each test question.

    Returns:
        The field `sets` of the manifest: for each run, the number of test questions, the share of them that need retrieval
        (`base_rate`), and the AUROC. Empty if there is only one run.
    """
    runs = examples.table.split_by_run()
    if len(runs) < 2:
        return {}
    test = examples.split.test
    measured = {}
    names = name_runs([run.path for run in runs])
    for name, run in zip(names, runs, strict=True):
        is_of_run = np.isin(test, run.numbers)
        needed = examples.needed[test][is_of_run]
        base_rate = float(needed.mean()) if len(needed) else None
        auroc = estimate_auroc(needed, needs[is_of_run])
        measured[name] = {"n": len(needed), "base_rate": base_rate, "auroc": asdict(auroc)}
    return {"sets": measured}


def _count_test_answers(examples: Examples, needs: FloatArray, threshold: float) -> dict[str, Any]:
    """Count right answers to the test questions: with the gate, with always retrieving, and with never retrieving.

    Args:
        examples: The label rows.
        needs: The need for retrieval that the gate predicts for each test question.
        threshold: The gate retrieves if the need is above it.

    Returns:
        The field `test_counts` of the manifest. Empty if a test question lacks a graded answer with passages (its
        `benefit` is None then), or if there are no test questions.
    """
    test = examples.split.test
    if not len(test) or any(examples.rows[row].benefit is None for row in test):
        return {}
    outcomes = _collect_outcomes(examples, test, needs)
    return {"test_counts": threshold_choice.evaluate_threshold(outcomes, threshold).to_record()}


def _collect_outcomes(examples: Examples, rows: NDArray[np.int64], needs: FloatArray) -> threshold_choice.GateOutcomes:
    """Combine the predicted needs of these rows with the grades of their answers without and with passages."""
    table = examples.table
    return threshold_choice.GateOutcomes(needs, table.closed_book_right[rows], table.retrieved_right[rows])


def _fit_distance(source: Mapping[str, Any], examples: Examples) -> Tensors:
    """Fit a measure of the distance between new questions and the training questions.

    Held-out questions show how far ordinary new questions are.

    Args:
        source: Which features are compared, as in the manifest.
        examples: The training data. Without train rows, the held-out rows are used in their place, and vice versa.
    """
    features = drift.read_distance_features(source, examples.questions, examples.readings)
    train = examples.split.train
    held_out = np.concatenate([examples.split.dev, examples.split.calibration, examples.split.test])
    if not len(train):
        train = held_out
    elif not len(held_out):
        held_out = train
    return drift.fit_distance(features[train], features[held_out])


# --- default threshold ----------------------------------------------------------------------------


class DefaultThreshold(NamedTuple):
    """The threshold of a gate if the user gives none.

    Attributes:
        threshold: Retrieve if the need is above it.
        notes: Notes for the model card.
        is_calibrated: Whether it was chosen on graded answers with and without passages.
    """

    threshold: float
    notes: list[str]
    is_calibrated: bool = True


def _choose_default_threshold(
    result: FitResult, examples: Examples, calibration: Mapping[str, Any], max_loss: float | None
) -> DefaultThreshold:
    """Choose the safe threshold that retrieves least, on held-out questions.

    Safe means: nearly as many right answers as with always retrieving.

    Args:
        result: The trained gate.
        examples: The label rows.
        calibration: Calibration of the gate's scores.
        max_loss: Share of right answers that the threshold may lose; None for the default.
    """
    rows = _list_held_out_rows(examples)
    if not len(rows):
        return DefaultThreshold(0.5, [NOT_CALIBRATED_NOTE], is_calibrated=False)
    limits = _make_limits(max_loss)
    needs = apply_calibration(result.raw(rows.tolist()), calibration)
    outcomes = _collect_outcomes(examples, rows, needs)
    threshold = threshold_choice.choose_safe(outcomes, limits)
    if threshold == ALWAYS_RETRIEVE:
        share = len(rows) / len(examples.rows)
        return DefaultThreshold(threshold, [_explain_always(outcomes, limits, share)])
    notes = [describe_threshold(threshold_choice.evaluate_threshold(outcomes, threshold), limits)]
    if threshold == threshold_choice.NEVER_RETRIEVE:
        notes.append(NEVER_RETRIEVES_NOTE)
    return DefaultThreshold(threshold, notes)


def _list_held_out_rows(examples: Examples) -> NDArray[np.int64]:
    """List the rows outside the train split that have both answers graded."""
    split = examples.split
    rows = np.concatenate([split.dev, split.calibration, split.test])
    # The benefit of a row is None if it has no graded open-book answer.
    return np.array([row for row in rows.tolist() if examples.rows[row].benefit is not None], dtype=np.int64)


def _make_limits(max_loss: float | None) -> threshold_choice.SafetyLimits:
    """Return how much accuracy a threshold may lose compared with always retrieving.

    `max_loss` limits the measured loss, `loss_bound` its upper confidence bound.
    """
    default = threshold_choice.SafetyLimits()
    if max_loss is None:
        return default
    loss_bound = min(0.99, max_loss + default.loss_bound - default.max_loss)  # bounds of 1 are not allowed
    return threshold_choice.SafetyLimits(max_loss=max_loss, loss_bound=loss_bound)


def _explain_always(
    outcomes: threshold_choice.GateOutcomes, limits: threshold_choice.SafetyLimits, share: float
) -> str:
    """Explain why the default threshold always retrieves, and what could change this.

    Args:
        outcomes: Needs and grades of questions that the gate did not learn from.
        limits: What a threshold may lose. No threshold stays within these limits.
        share: Share of all label rows that are in `outcomes`.
    """
    required = threshold_choice.count_required_rows(outcomes, limits)
    advice = "More label rows would not help: try another gate, or choose a threshold with knowgate calibrate"
    if required is not None:
        advice = f"With about {math.ceil(required / share)} label rows, such a threshold could be found"
    return (
        f"by default it always retrieves: on {len(outcomes)} questions that it did not learn from, no threshold is "
        f"shown to lose at most {format_points(limits.loss_bound)} of accuracy with {limits.confidence:.0%} "
        f"confidence. {advice}"
    )


def describe_threshold(result: threshold_choice.ThresholdResult, limits: threshold_choice.SafetyLimits) -> str:
    """Describe how many searches a threshold saves and how much accuracy it loses.

    Args:
        result: The threshold, evaluated on questions that the gate did not learn from.
        limits: The limits that it was chosen for.
    """
    loss = threshold_choice.NetLoss(result.harmed, result.gained, result.n)
    change = f"loses {100 * loss.mean:.1f}" if loss.mean >= 0 else f"gains {-100 * loss.mean:.1f}"
    worst_case = f"at most {100 * loss.upper(limits.confidence):.1f} with {limits.confidence:.0%} confidence"
    return (
        f"its threshold saves the most searches of all that lose at most {format_points(limits.max_loss)} of accuracy. "
        f"On {result.n} questions that the gate did not learn from, it saves {1 - result.rate:.0%} of the searches and "
        f"{change} points, {worst_case} ({result.accuracy:.1%} right; always retrieving: "
        f"{result.right_always / result.n:.1%}). The threshold was chosen on the same questions; knowgate calibrate gives "
        "a guarantee"
    )


def format_points(share: float) -> str:
    """Format a share of answers as percentage points."""
    return f"{100 * share:g} point" + ("" if share == 0.01 else "s")


def describe_weakness(manifest: Mapping[str, Any]) -> str:
    """Warn if a gate is worse on held-out questions than a trivial rule, such as always retrieving.

    Returns:
        The warning in one or two sentences; '' if there is no reason to warn.
    """
    warning = _compare_with_constant_policies(manifest.get("test_counts"))
    if warning:
        return warning
    accuracy = manifest["metrics"].get("accuracy", {}).get("value")
    majority = majority_accuracy(manifest)
    if accuracy is not None and accuracy < majority:
        return (
            f"On the held-out questions, retrieving above a need of 0.5 is right for {accuracy:.1%}. Always choosing "
            f"the more frequent class is right for {majority:.1%}."
        )
    return ""


def _compare_with_constant_policies(counts: Mapping[str, int] | None) -> str:
    """Warn if a gate gives fewer right answers than never retrieving, or clearly fewer than always retrieving.

    `counts` is the field `test_counts` of the manifest, or None. Without a reason to warn, '' is returned.
    """
    if not counts:
        return ""
    lost = counts["right_always"] - counts["right"]
    max_lost = counts["n"] * threshold_choice.SafetyLimits().loss_bound
    if counts["right"] < counts["right_never"] and counts["retrieved"]:
        policy, n_right = "never", counts["right_never"]
    elif lost > max_lost:
        policy, n_right = "always", counts["right_always"]
    else:
        return ""
    return (
        f"On the {counts['n']} held-out questions it is worse than {policy} retrieving: {counts['right']} right answers "
        f"instead of {n_right}."
    )


def render_gate_card(manifest: Mapping[str, Any], command: str) -> str:
    """Render the model card, with training data, metrics and usage."""
    model = escape_markdown(manifest["model"]["name"])
    parts = [
        f"# {manifest['gate']} gate for {model}",
        f"A knowgate gate, fitted {manifest['created']}. {_explain_need(manifest)}",
    ]
    synthetic = describe_synthetic(manifest.get("synthetic", 0), sum(manifest["split"].values()))
    if synthetic:
        parts.append(f"**{synthetic}**")
    parts.append(model_card.format_usage(gate="THIS_FOLDER", model=model, docs="FOLDER"))
    parts.append(_format_gate_facts(manifest))
    if manifest["gate"] != CONSTANT_GATE:
        parts += _format_test_results(manifest)
    return model_card.join_card(parts, manifest["notes"], command)


def _explain_need(manifest: Mapping[str, Any]) -> str:
    """Explain in a sentence what the need of a gate means."""
    if manifest["gate"] == CONSTANT_GATE:
        return "It decides the same for every question, whatever its text."
    return f"Its need is a calibrated probability that {TARGET_MEANINGS[manifest['target']]}."


def _format_test_results(manifest: Mapping[str, Any]) -> list[str]:
    """Format the metrics on the test split and the ROC curve, as parts of the card."""
    majority = majority_accuracy(manifest)
    extra_rows = {"accuracy": f"| the same if every question gets the more frequent class | {majority:.3f} | |"}
    metrics = model_card.format_metrics(manifest["metrics"], METRIC_NAMES, extra_rows)
    return [f"## Measured on the held-out test split\n\n{metrics}", "![ROC curve on the test split](curve.svg)"]


def _format_gate_facts(manifest: Mapping[str, Any]) -> str:
    """Format the table of the model card about training data and decisions."""
    sizes = ", ".join(f"{name} {count}" for name, count in manifest["split"].items())
    options = [f"{key} {value}" for key, value in manifest["options"].items() if not isinstance(value, list)]
    facts = [
        *model_card.list_training_facts(manifest),
        ("questions", f"{sizes}; {manifest['base_rate']:.0%} of them need retrieval"),
        ("needs", ", ".join(manifest["needs"]) or "no signals of the LLM"),
        ("options", ", ".join(options)),
    ]
    if manifest["gate"] != CONSTANT_GATE:
        facts.append(("calibration", manifest["calibration"]["kind"]))
        facts.append(("retrieves, as fitted", describe_retrieval_rule(float(manifest["threshold"]))))
    if manifest.get("reference"):
        facts.append(("stored with it", "ten questions with their hidden states"))
    return model_card.format_facts(facts)


def majority_accuracy(manifest: Mapping[str, Any]) -> float:
    """Return the accuracy of always predicting the more frequent class (retrieve or not)."""
    test_rate = manifest.get("test_rate")
    share_needed = float(manifest["base_rate"] if test_rate is None else test_rate)
    return max(share_needed, 1 - share_needed)


def draw_roc_curve(needed: Any, needs: FloatArray) -> str:
    """Draw the ROC curve of a gate as an SVG.

    Args:
        needed: Whether each question needs retrieval.
        needs: The gate's score of each question.
    """
    order = np.argsort(-needs, kind="stable")  # highest score first
    true_positives = np.concatenate([[0], np.cumsum(needed[order])])
    false_positives = np.concatenate([[0], np.cumsum(~needed[order])])
    # The last counts are the totals; 1 avoids a division by zero if there is only one class.
    true_rates = true_positives / max(1, true_positives[-1])
    false_rates = false_positives / max(1, false_positives[-1])
    points = [ChartPoint(float(x), float(y)) for x, y in zip(false_rates, true_rates, strict=True)]
    chance = Curve("chance", [ChartPoint(0, 0), ChartPoint(1, 1)], GRAY, dashed=True)
    frame = ChartFrame(Axis("needless retrievals"), Axis("needed retrievals found"), width=260, height=260)
    return render_line_chart([chance, Curve("the gate", points)], frame)
