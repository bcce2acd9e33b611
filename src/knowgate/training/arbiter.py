"""The verb `fit arbiter`: a mode and label runs in, the fitted arbiter out.

Knows no arbiter: their fit functions come from the table of arbiters. Splitting, calibrating, measuring on questions
held out, the card and the folder are the same for all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.display import escape_markdown, escape_markdown_code
from knowgate.core.files import check_replaceable
from knowgate.core.registry import load_target
from knowgate.core.validation import check_seed
from knowgate.data.runs.folder import RunsLike, resolve_run_paths
from knowgate.errors import BadSetting, MissingExtra, UnknownName
from knowgate.gates.arbiters import FITTED_ARBITERS, load_arbiter
from knowgate.gates.arbiters.fitted_arbiter import ARBITER_FORMAT, ARBITER_KIND, ARBITER_MANIFEST, FittedArbiter
from knowgate.gates.artifacts.gate_folder import SEEN_FILE, write_artifact
from knowgate.gates.artifacts.networks import apply_calibration
from knowgate.stats.bootstrap import Bootstrap, Estimate, estimate_auroc, summarize_resamples
from knowgate.stats.metrics import BoolArray, FloatArray, weighted_mean
from knowgate.training.arbiter_pairs import AnswerPairs, ArbiterResult, load_answer_pairs
from knowgate.training.classifiers import fit_platt_scaling
from knowgate.training.fit_function import (
    FitFunction,
    FitProgressCallback,
    check_fit_options,
    ignore_progress,
    read_fit_options,
    select_injected_arguments,
)
from knowgate.training.judges.checkpoint import checkpoint_folder, delete_checkpoint

EXTRA = "train"


def fit_arbiter(
    runs: RunsLike,
    *,
    out: str | Path,
    mode: str = "features",
    seed: int = 0,
    watch: FitProgressCallback | None = None,
    command: str = "",
    **options: Any,
) -> FittedArbiter:
    """Fit an arbiter on label runs with both answers, measure it on questions held out, write its folder, load it.

    mode: features (cheap numbers of both answers) or another of the table. options: those of the mode, see
    `options_of(arbiter_fit(mode))`. command: what the card says it was made by.

    Example:
        >>> fit_arbiter("runs/train", out="my-arbiter")  # doctest: +SKIP
    """
    function, folder = load_arbiter_fit_function(mode), Path(out)
    if not runs:
        raise BadSetting("fit arbiter learns from label runs: give --labels RUN, made by knowgate label.")
    check_seed(seed)
    check_replaceable(folder, ARBITER_MANIFEST, ARBITER_KIND)  # before the work, not after it
    _check_mode(mode, options)
    check_fit_options(f"arbiter --mode {mode}", function, options)
    try:
        pass

        pairs = load_answer_pairs(resolve_run_paths(runs), seed)
        things = {"seed": seed, "work": checkpoint_folder(folder), "watch": watch or ignore_progress}
        fitted: ArbiterResult = function(pairs, **select_injected_arguments(function, things), **options)
        save_arbiter(fitted, pairs, folder, command=command)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("knowgate"):
            raise
        raise MissingExtra("fitting an arbiter", EXTRA) from error
    delete_checkpoint(folder)
    loaded: Any = load_arbiter(str(folder))
    arbiter: FittedArbiter = loaded
    return arbiter


def _check_mode(mode: str, given: Mapping[str, Any]) -> None:
    """An option of another mode names that mode."""
    modes = {name: read_fit_options(load_arbiter_fit_function(name)) for name in FITTED_ARBITERS}
    for option in given:
        owner = next((name for name, known in modes.items() if option in known), mode)
        if option not in modes[mode] and owner != mode:
            raise BadSetting(f"'{option}' belongs to fit arbiter --mode {owner}: add --mode {owner}, or leave it out.")


def load_arbiter_fit_function(mode: str) -> FitFunction:
    """The fit function of a mode. What it can be told is in its signature: see `options_of`."""
    if mode not in FITTED_ARBITERS:
        raise UnknownName("mode of fit arbiter", mode, FITTED_ARBITERS)
    found: FitFunction = load_target(FITTED_ARBITERS[mode].fit, f"fitting {mode}", FITTED_ARBITERS[mode].extra)
    return found


ARBITER_METRIC_NAMES = {
    "auroc_closed": "AUROC of the answer from memory being right",
    "auroc_open": "AUROC of the answer with passages being right",
    "accuracy": "accuracy of the answer it chooses",
    "always": "accuracy of the answer with passages",
    "never": "accuracy of the answer from memory",
    "oracle": "at least one of the two is right",
    "gain": "gained by choosing, against always the answer with passages",
    "takes_closed": "how often it takes the answer from memory",
}


def save_arbiter(fitted: ArbiterResult, pairs: AnswerPairs, out: Path, *, command: str = "") -> None:
    """Calibrate each side on the calibration split, measure on the test split, write the folder whole.

    It is calibrated where the answers differ: nobody asks it elsewhere.
    """
    places = pairs.asked(pairs.split.calibration)
    calibration: dict[str, dict[str, Any]] = {"closed": {"kind": "none"}, "open": {"kind": "none"}}
    if not fitted.is_calibrated:
        raw = fitted.raw(places.tolist())
        calibration = _calibration(raw, pairs.closed_right[places], pairs.open_right[places])
    metrics = _measures(_probabilities(fitted.raw(pairs.split.test.tolist()), calibration), pairs)
    manifest = {
        **_describe(fitted, pairs),
        "calibration": calibration,
        "metrics": {name: asdict(value) for name, value in metrics.items()},
    }
    seen = ("\n".join(pairs.seen(fitted.learnt_all)) + "\n").encode()
    write_artifact(
        out,
        manifest,
        fitted.tensors,
        render_arbiter_card(manifest, command),
        {**fitted.files, SEEN_FILE: seen},
        artifact_format=ARBITER_FORMAT,
    )


def _calibration(raw: FloatArray, closed: BoolArray, opened: BoolArray) -> dict[str, dict[str, Any]]:
    truths = {"closed": closed, "open": opened}
    return {side: fit_platt_scaling(raw[:, place], truths[side]) for place, side in enumerate(truths)}


def _probabilities(raw: FloatArray, calibration: Mapping[str, Mapping[str, Any]]) -> FloatArray:
    found: FloatArray = np.stack(
        [apply_calibration(raw[:, place], one) for place, one in enumerate(calibration.values())], 1
    )
    return found


def _measures(beliefs: FloatArray, pairs: AnswerPairs) -> dict[str, Estimate]:
    places = pairs.split.test
    closed, opened = pairs.closed_right[places], pairs.open_right[places]
    takes = (beliefs[:, 0] > beliefs[:, 1]) & pairs.differ[places]
    return {
        "auroc_closed": estimate_auroc(closed, beliefs[:, 0]),
        "auroc_open": estimate_auroc(opened, beliefs[:, 1]),
        **_shares({
            "accuracy": np.where(takes, closed, opened), "always": opened, "never": closed, "oracle": closed | opened,
            "takes_closed": takes,
        }),
    }  # fmt: skip


def _shares(columns: Mapping[str, BoolArray]) -> dict[str, Estimate]:
    """Means with bootstrap intervals, and the gain over always on the same resamples."""
    n = len(columns["always"])
    if not n:
        return {}
    table = np.stack([column.astype(float) for column in columns.values()], axis=1)
    drawn = Bootstrap(n).apply([lambda weights: dict(zip(columns, weighted_mean(weights, table).T, strict=True))])[0]
    return {
        name: summarize_resamples(values)
        for name, values in {**drawn, "gain": drawn["accuracy"] - drawn["always"]}.items()
    }


def _describe(fitted: ArbiterResult, pairs: AnswerPairs) -> dict[str, Any]:
    """Everything the arbiter is bound to."""
    settings = pairs.trial.settings
    return {
        "arbiter": fitted.arbiter,
        "options": dict(fitted.options),
        "needs": sorted(fitted.needs),
        "wants_passages": fitted.wants_passages,
        "model": {"name": settings["model"], "fingerprint": settings["model_fingerprint"]},
        "prompts": settings["prompts_fingerprint"],
        "retriever": settings.get("retriever_fingerprint"),
        "grader": settings["grader"],
        "data": [{"run": Path(run).name} for run in pairs.trial.runs],
        "data_hash": settings["data_fingerprint"],
        "split": pairs.split.sizes(),
        "base_rates": {"closed": float(pairs.closed_right.mean()), "open": float(pairs.open_right.mean())},
        "created": time.strftime("%Y-%m-%d", time.gmtime()),
        "notes": [*fitted.notes, *_left_out(pairs.left_out)],
    }


def _left_out(counts: Mapping[str, int]) -> list[str]:
    return [f"{count} rows were left out: {reason}" for reason, count in counts.items() if count]


def render_arbiter_card(manifest: Mapping[str, Any], command: str) -> str:
    """Markdown with data, splits, measures with intervals, and how to use it."""
    parts = [
        f"# {manifest['arbiter']} arbiter for {escape_markdown(manifest['model']['name'])}",
        f"A knowgate arbiter, fitted {manifest['created']}. After retrieval it says how probably the answer from "
        "memory and the answer with passages are right; the likelier one is given.",
        '```console\nknowgate ask --arbiter THIS_FOLDER --gate GATE --docs FOLDER "a question"\n```',
        _facts(manifest),
        "## Measured on the held-out test split\n\n" + _metrics(manifest["metrics"]),
        *(
            ["## Notes\n\n" + "\n".join(f"- {escape_markdown(note)}" for note in manifest["notes"])]
            if manifest["notes"]
            else []
        ),
        *([f"## Made by\n\n```console\n{escape_markdown_code(command)}\n```"] if command else []),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(manifest: Mapping[str, Any]) -> str:
    rates = manifest["base_rates"]
    rows: Sequence[tuple[str, str]] = [
        ("model", f"{manifest['model']['name']} ({manifest['model']['fingerprint']})"),
        ("prompts", manifest["prompts"]),
        ("label runs", ", ".join(item["run"] for item in manifest["data"])),
        ("graded by", manifest["grader"]),
        ("questions", ", ".join(f"{name} {count}" for name, count in manifest["split"].items())),
        ("right", f"{rates['closed']:.0%} from memory, {rates['open']:.0%} with passages"),
        (
            "needs",
            ", ".join([*manifest["needs"], *(["passages"] if manifest["wants_passages"] else [])]) or "two texts",
        ),
    ]
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {escape_markdown(str(value))} |" for name, value in rows)


def _metrics(metrics: Mapping[str, Mapping[str, float | None]]) -> str:
    lines = ["| measure | value | 95 % interval |", "|---|---|---|"]
    for name, one in metrics.items():
        value = "not defined" if one["value"] is None else f"{one['value']:.3f}"
        interval = "" if one["low"] is None else f"{one['low']:.3f} to {one['high']:.3f}"
        lines.append(f"| {ARBITER_METRIC_NAMES[name]} | {value} | {interval} |")
    return "\n".join(lines)
