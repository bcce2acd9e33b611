"""From fitted scores to an arbiter: calibrate, measure on the held-out test split, write the folder with its card."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.arbiters import write_arbiter
from knowgate.display import markdown_code, markdown_text
from knowgate.fitting.arbiters.arbiter_result import ArbiterResult
from knowgate.fitting.arbiters.pairs import Pairs
from knowgate.fitting.probability import fit_calibration
from knowgate.gates import SEEN, to_probability
from knowgate.statistics import Bools, Draws, Estimate, Floats, estimate, estimate_auroc, weighted_mean

WORDS = {
    "auroc_closed": "AUROC of the answer from memory being right",
    "auroc_open": "AUROC of the answer with passages being right",
    "accuracy": "accuracy of the answer it chooses",
    "always": "accuracy of the answer with passages",
    "never": "accuracy of the answer from memory",
    "oracle": "at least one of the two is right",
    "gain": "gained by choosing, against always the answer with passages",
    "takes_closed": "how often it takes the answer from memory",
}


def save_arbiter(fitted: ArbiterResult, pairs: Pairs, out: Path, *, command: str = "") -> None:
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
    write_arbiter(out, manifest, fitted.tensors, card(manifest, command), {**fitted.files, SEEN: seen})


def _calibration(raw: Floats, closed: Bools, opened: Bools) -> dict[str, dict[str, Any]]:
    truths = {"closed": closed, "open": opened}
    return {side: fit_calibration(raw[:, place], truths[side]) for place, side in enumerate(truths)}


def _probabilities(raw: Floats, calibration: Mapping[str, Mapping[str, Any]]) -> Floats:
    found: Floats = np.stack([to_probability(raw[:, place], one) for place, one in enumerate(calibration.values())], 1)
    return found


def _measures(beliefs: Floats, pairs: Pairs) -> dict[str, Estimate]:
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


def _shares(columns: Mapping[str, Bools]) -> dict[str, Estimate]:
    """Means with bootstrap intervals, and the gain over always on the same resamples."""
    n = len(columns["always"])
    if not n:
        return {}
    table = np.stack([column.astype(float) for column in columns.values()], axis=1)
    drawn = Draws(n).apply([lambda weights: dict(zip(columns, weighted_mean(weights, table).T, strict=True))])[0]
    return {name: estimate(values) for name, values in {**drawn, "gain": drawn["accuracy"] - drawn["always"]}.items()}


def _describe(fitted: ArbiterResult, pairs: Pairs) -> dict[str, Any]:
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


def card(manifest: Mapping[str, Any], command: str) -> str:
    """Markdown with data, splits, measures with intervals, and how to use it."""
    parts = [
        f"# {manifest['arbiter']} arbiter for {markdown_text(manifest['model']['name'])}",
        f"A knowgate arbiter, fitted {manifest['created']}. After retrieval it says how probably the answer from "
        "memory and the answer with passages are right; the likelier one is given.",
        '```console\nknowgate ask --arbiter THIS_FOLDER --gate GATE --docs FOLDER "a question"\n```',
        _facts(manifest),
        "## Measured on the held-out test split\n\n" + _metrics(manifest["metrics"]),
        *(
            ["## Notes\n\n" + "\n".join(f"- {markdown_text(note)}" for note in manifest["notes"])]
            if manifest["notes"]
            else []
        ),
        *([f"## Made by\n\n```console\n{markdown_code(command)}\n```"] if command else []),
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
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {markdown_text(str(value))} |" for name, value in rows)


def _metrics(metrics: Mapping[str, Mapping[str, float | None]]) -> str:
    lines = ["| measure | value | 95 % interval |", "|---|---|---|"]
    for name, one in metrics.items():
        value = "not defined" if one["value"] is None else f"{one['value']:.3f}"
        interval = "" if one["low"] is None else f"{one['low']:.3f} to {one['high']:.3f}"
        lines.append(f"| {WORDS[name]} | {value} | {interval} |")
    return "\n".join(lines)
