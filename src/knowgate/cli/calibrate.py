"""`knowgate calibrate`: choose a gate's threshold, with evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE, print_tables
from knowgate.cli.options import parse_path
from knowgate.cli.progress import show_arbitration_progress
from knowgate.data.runs.folder import RunFolder, suggest_ask_options
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE, is_artifact
from knowgate.gates.calibration.threshold_calibration import calibrate


def calibrate_command(
    gate: Annotated[str, typer.Argument(help="Folder of a fitted gate, or a plain gate such as logprob:mean.")],
    labels: Annotated[
        list[Path],
        typer.Option(parser=parse_path, metavar="RUN", help="Label run with open-book answers; may be repeated."),
    ],
    max_loss: Annotated[
        float | None, typer.Option(help="Guarantee: accuracy lost against always retrieving, e.g. 0.02.")
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(show_default="0.95", help="Of the guarantee; with --max-loss.")
    ] = None,
    retrieval_rate: Annotated[
        float | None, typer.Option(help="Budget: share of questions to retrieve for, e.g. 0.5; never above it.")
    ] = None,
    best_accuracy: Annotated[
        bool, typer.Option("--best-accuracy", help="Most right answers; of several thresholds the one that skips most.")
    ] = False,
    net: Annotated[
        bool, typer.Option("--net", help="With --max-loss: count answers gained too. Default: harm alone, stricter.")
    ] = False,
    arbiter: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|rules",
            help="Who chooses after retrieval: the threshold is that of the cascade, gate and arbiter.",
        ),
    ] = None,
    held_out: Annotated[
        float, typer.Option(min=0, max=0.95, help="Share of the questions kept back to try the threshold on.")
    ] = 0.5,
    out: Annotated[
        Path | None,
        typer.Option(parser=parse_path, metavar="DIR", help="Leave GATE as it is and write a copy with the threshold."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the split in two.")] = 0,
) -> None:
    """Choose a gate's threshold: by guarantee, by budget or by accuracy.

    Questions the gate or the arbiter was fitted on are left out; no LLM is run. With --arbiter the threshold is that of
    the cascade, and what is lost is still counted against always retrieving without it.

    Example: knowgate calibrate my-gate --labels run --max-loss 0.02 --confidence 0.95
    """
    with show_arbitration_progress(arbiter) as weighed:
        calibration = calibrate(
            gate,
            labels,
            max_loss=max_loss,
            confidence=confidence,
            retrieval_rate=retrieval_rate,
            best_accuracy=best_accuracy,
            net=net,
            arbiter=arbiter,
            held_out=held_out,
            out=out,
            seed=seed,
            on_weighed=weighed,
        )
    print_tables([calibration.sheet])
    STDERR_CONSOLE.print(calibration.sentence)
    if calibration.left_out:
        left_out = ", ".join(f"{count} {reason}" for reason, count in calibration.left_out.items())
        STDERR_CONSOLE.print(f"Left out: {left_out}.")
    if is_artifact(gate):
        llm = RunFolder(labels[0]).manifest()["settings"]["model"]
        used = f"knowgate ask --gate {calibration.source}{_with(arbiter)}{suggest_ask_options(llm)}"
        STDERR_CONSOLE.print(f"Written to {calibration.source}. Use it: {used}")
    else:
        STDERR_CONSOLE.print(_how_to_pass(gate, calibration.threshold) + _with(arbiter))


def _how_to_pass(gate: str, threshold: float) -> str:
    if threshold == ALWAYS_RETRIEVE:
        return "Use it: knowgate ask --gate always"
    return f"A plain gate keeps no threshold; pass it: knowgate ask --gate {gate} --threshold {threshold:g}"


def _with(arbiter: str | None) -> str:
    return f" --arbiter {arbiter}" if arbiter else ""
