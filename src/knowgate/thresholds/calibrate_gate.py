"""`calibrate`: a gate and label runs in, a threshold with its evidence out. What `knowgate calibrate` calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from knowgate.errors import BadSetting
from knowgate.gates import check_named, folder_of, gate_name, verdict_of
from knowgate.runs import Runs, run_paths
from knowgate.thresholds.calibration import Calibration, Target, find_threshold, store
from knowgate.types import Arbiter, Gate

CONFIDENCE = 0.95  # of a guarantee, unless given


def calibrate(
    gate: str | Path | Gate,
    runs: Runs,
    *,
    max_loss: float | None = None,
    confidence: float | None = None,
    retrieval_rate: float | None = None,
    best_accuracy: bool = False,
    net: bool = False,
    arbiter: str | Path | Arbiter | None = None,
    held_out: float = 0.5,
    out: str | Path | None = None,
    seed: int = 0,
    on_weighed: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Choose a gate's threshold by guarantee, by budget or by accuracy; questions it was fitted on are left out.

    gate: folder of a fitted gate, the gate itself, or a plain one such as 'logprob:mean'. A fitted gate's threshold is
    written into its folder with the evidence, or into a copy of it at `out`. A gate in hand keeps the threshold it has,
    for using a thing does not change it: go on with the `gate` of what comes back.
    runs: label runs of the gate's own LLM, with open-book answers; no LLM is run.
    Exactly one of: max_loss, accuracy lost against always retrieving, at most, with `confidence` (0.95);
    retrieval_rate, the share of questions to retrieve for, never above it; best_accuracy, most right answers.
    net: of max_loss, count answers gained against those lost; without it only harm counts, which is stricter.
    arbiter: chooses after retrieval (a folder, 'rules', or itself); the threshold is then that of the cascade, the loss
    still against always giving the open-book answer, and the guarantee holds with this arbiter alone.
    on_weighed: is told how many of so many questions the arbiter has weighed.
    held_out: share of the questions kept back to try the threshold on. seed: of that split.

    Example:
        >>> calibrate("my-gate", "runs/calibration", max_loss=0.02)  # doctest: +SKIP
    """
    target = target_of(max_loss, confidence, retrieval_rate, best_accuracy, net)
    weighing = str(arbiter) if isinstance(arbiter, Path) else arbiter
    given = str(gate) if isinstance(gate, Path) else gate
    if isinstance(given, str):
        check_named(given)
    folder = folder_of(given)
    if out is not None and folder is None:
        raise BadSetting(
            f"'{gate_name(given)}' is not a fitted gate, so there is nothing to write to --out; leave it away."
        )
    if verdict_of(given) == "own":
        raise BadSetting(
            "a threshold is chosen for the calibrated need, not for a gate's own verdict. Leave ',verdict=own' away: "
            f"knowgate calibrate {folder}"
        )
    found = find_threshold(
        given, run_paths(runs), target, share=held_out, seed=seed, arbiter=weighing, on_weighed=on_weighed
    )
    if folder is None:
        return found
    return replace(found, source=str(store(found, folder, Path(out) if out is not None else None)))


def target_of(
    loss: float | None, confidence: float | None, rate: float | None, best: bool, net: bool = False
) -> Target:
    """What the threshold is for; exactly one thing."""
    given = (loss is not None) + (rate is not None) + best
    if given != 1:
        raise BadSetting(
            f"say what the threshold is for: exactly one of --max-loss 0.02, --retrieval-rate 0.5, --best-accuracy "
            f"({given} were given)."
        )
    if loss is not None:
        delta = round(1 - (CONFIDENCE if confidence is None else confidence), 12)
        return Target("guarantee", loss, delta, "net" if net else "harm")
    if confidence is not None or net:
        option = "--net" if net else "--confidence"
        raise BadSetting(f"{option} belongs to --max-loss; the other targets give no guarantee.")
    return Target("accuracy") if rate is None else Target("budget", rate)
