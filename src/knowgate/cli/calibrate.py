"""`knowgate calibrate`: choose the threshold of a gate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import inform, print_tables
from knowgate.cli.options import path_option, suggest_ask_options
from knowgate.cli.progress import show_progress
from knowgate.data.runs.folder import RunFolder
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE, is_artifact
from knowgate.gates.calibration.threshold_calibration import Calibration, CalibrationOptions, calibrate


def calibrate_command(
    gate: Annotated[
        str, typer.Argument(help="Gate to calibrate: folder of a fitted gate, or a name such as logprob:mean.")
    ],
    labels: Annotated[list[Path], path_option("RUN", "Label run (recorded answers with passages). May be repeated.")],
    options: CalibrationOptions,
    arbiter: Annotated[
        str | None,
        typer.Option(metavar="DIR|rules", help="Arbiter (chooses between two answers) used with the gate."),
    ] = None,
) -> None:
    """Choose the threshold of a gate.

    The gate scores how likely a question needs a search. It retrieves if the score is above the threshold. The
    threshold is chosen for a guaranteed accuracy, a retrieval budget or the best accuracy. A fitted gate stores it.
    Training questions are left out. No LLM runs.

    With --arbiter, the threshold is for the gate and the arbiter together. An arbiter picks one of the answers with and
    without passages. The loss is still measured against always retrieving without an arbiter.

    Example: knowgate calibrate my-gate --labels run --max-loss 0.02 --confidence 0.95
    """
    with show_progress("arbitrating answers", "questions") as on_progress:
        calibration = calibrate(gate, labels, arbiter=arbiter, on_progress=on_progress, options=options)
    print_tables([calibration.table])
    inform(calibration.sentence)
    if calibration.left_out:
        inform("Left out: " + ", ".join(f"{count} {reason}" for reason, count in calibration.left_out.items()) + ".")
    arbiter_flag = f" --arbiter {arbiter}" if arbiter else ""
    inform(_suggest_use(gate, calibration, labels[0], arbiter_flag))


def _suggest_use(gate: str, calibration: Calibration, run: Path, arbiter_flag: str) -> str:
    """Say how to use the threshold. `run` is a label run of the LLM."""
    if is_artifact(gate):  # it stores its threshold
        model = RunFolder(run).manifest()["settings"]["model"]
        command = f"knowgate ask --gate {calibration.source}{arbiter_flag}{suggest_ask_options(model)}"
        return f"Written to {calibration.source}. Use it: {command}"
    if calibration.threshold == ALWAYS_RETRIEVE:
        return f"Use it: knowgate ask --gate always{arbiter_flag}"
    command = f"knowgate ask --gate {gate} --threshold {calibration.threshold:g}{arbiter_flag}"
    return f"This gate cannot store a threshold. Pass it on the command line: {command}"
