"""From a fitted score to an artefact: calibrate, measure on the held-out test split, write the folder with its card."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.fitting.card import card
from knowgate.fitting.examples import Examples
from knowgate.fitting.fit_result import FitResult
from knowgate.fitting.metrics import Floats, Measured, measure
from knowgate.fitting.probability import fit_calibration
from knowgate.gates import SEEN, calibrate, write_artefact
from knowgate.types import Want


@dataclass(frozen=True)
class FitReport:
    """What came out: measures on the test split, in print and in the card."""

    path: Path
    manifest: dict[str, Any]
    metrics: dict[str, Measured]


def save_fitted(
    fitted: FitResult, examples: Examples, out: Path, *, command: str = "", threshold: float | None = None
) -> FitReport:
    """Calibrate on the calibration split, measure on the test split, write the folder whole.

    threshold: None for 0.5, or, where need is the probability that retrieval helps, for what answers most dev and
    calibration questions right: helping is rarer than one in two, so 0.5 would hardly ever retrieve.
    """
    split = examples.split
    calibration = fit_calibration(fitted.raw(split.calibration.tolist()), examples.needed[split.calibration])
    needs = calibrate(fitted.raw(split.test.tolist()), calibration) if len(split.test) else np.empty(0)
    truth = examples.needed[split.test]
    metrics = measure(truth, needs)
    manifest = {
        **describe(fitted, examples),
        "calibration": calibration,
        "metrics": {name: asdict(value) for name, value in metrics.items()},
        "threshold": _threshold(fitted, examples, calibration) if threshold is None else threshold,
    }
    text = card(manifest, fitted.notes, command)
    seen = ("\n".join(examples.seen) + "\n").encode()
    files = {**fitted.files, SEEN: seen, "curve.svg": curve(truth, needs).encode()}
    write_artefact(out, manifest, fitted.tensors, text, files)
    return FitReport(out, manifest, metrics)


def _threshold(fitted: FitResult, examples: Examples, calibration: Mapping[str, Any]) -> float:
    places = np.concatenate([examples.split.dev, examples.split.calibration]).tolist()
    if examples.target == "known" or not places:
        return 0.5
    needs = calibrate(fitted.raw(places), calibration)
    gains = np.array([examples.rows[place].benefit or 0 for place in places])
    tried = np.concatenate([[0.0], np.unique(needs)])
    scores = [gains[needs > threshold].sum() for threshold in tried]
    return float(tried[int(np.argmax(scores))])  # the first among equals retrieves most


def describe(fitted: FitResult, examples: Examples) -> dict[str, Any]:
    """Everything the gate is bound to."""
    settings = examples.settings
    want = {key: value for key, value in asdict(fitted.want).items() if value != asdict(Want())[key]}
    return {
        "gate": fitted.gate,
        "options": dict(fitted.options),
        "needs": sorted(fitted.needs),
        "want": {**want, "layers": list(fitted.want.layers)},
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
        "notes": list(fitted.notes),
    }


def curve(needed: Any, needs: Floats, size: int = 260) -> str:
    """The ROC curve as a small SVG picture, drawn without a plotting library."""
    order = np.argsort(-needs, kind="stable")
    hits = np.concatenate([[0], np.cumsum(needed[order])])
    falls = np.concatenate([[0], np.cumsum(~needed[order])])
    x, y = falls / max(1, falls[-1]), hits / max(1, hits[-1])
    points = " ".join(f"{20 + a * size:.1f},{20 + (1 - b) * size:.1f}" for a, b in zip(x, y, strict=True))
    out = io.StringIO()
    side = size + 40
    out.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}" width="{side}" height="{side}">')
    out.write(f'<rect x="20" y="20" width="{size}" height="{size}" fill="none" stroke="#bbb"/>')
    out.write(f'<line x1="20" y1="{20 + size}" x2="{20 + size}" y2="20" stroke="#bbb" stroke-dasharray="4"/>')
    out.write(f'<polyline points="{points}" fill="none" stroke="#0072b2" stroke-width="2"/></svg>\n')
    return out.getvalue()
