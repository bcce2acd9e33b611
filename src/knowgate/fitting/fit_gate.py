"""`fit`: a gate's name and label runs in, a fitted gate out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from knowgate.errors import UnknownName
from knowgate.fitting.adaptive import fit_adaptive
from knowgate.fitting.examples import load_examples
from knowgate.fitting.fusion import fit_fusion
from knowgate.fitting.probe import fit_probe
from knowgate.fitting.save import FitResult, save_fitted
from knowgate.gates import FittedGate, load_fitted
from knowgate.runs import Runs, run_paths

FITS: dict[str, Callable[..., FitResult]] = {"probe": fit_probe, "fusion": fit_fusion, "adaptive": fit_adaptive}


def fit(
    name: str,
    runs: Runs,
    *,
    out: str | Path,
    target: Any = None,
    threshold: float | None = None,
    seed: int = 0,
    watch: Any = None,
    command: str = "",
    **options: Any,
) -> FittedGate:
    """Fit a gate to the LLM of these label runs and write it to the folder `out`."""
    if name not in FITS:
        raise UnknownName("fitted gate", name, FITS)
    examples = load_examples(run_paths(runs), target=target, seed=seed)
    save_fitted(FITS[name](examples, **options), examples, Path(out), command=command, threshold=threshold)
    gate = load_fitted(str(out))
    assert isinstance(gate, FittedGate)
    return gate
