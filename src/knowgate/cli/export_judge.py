"""`knowgate export-judge`: export a gate's judge as a GGUF file for llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.cli.options import parse_path
from knowgate.cli.progress import show_progress
from knowgate.training.judges.gguf_export import ExportedJudge, export_judge


def export_judge_command(
    gate: Annotated[
        Path,
        typer.Argument(
            parser=parse_path, metavar="GATE", help="Folder of a gate from `fit judge`, or from `fit ik` with LoRA."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            parser=parse_path, metavar="DIR", help="Folder to write: a copy of the gate with adapter/judge.gguf."
        ),
    ],
    numbers: Annotated[
        Literal["q8_0", "f16"],
        typer.Option(help="Number format of the weights: q8_0 (8 bits), or f16 (16 bits, twice the size)."),
    ] = "q8_0",
) -> None:
    """Copy a gate, with its judge (the model that scores questions) exported as a GGUF file for llama.cpp.

    llama.cpp needs less memory and no torch. The judge must be based on a Llama or Qwen2 model. To use the new gate,
    install the extra llamacpp.

    Example: knowgate export-judge my-judge --out my-fast-judge
    """
    with show_progress("writing the judge", "tensors", STDERR_CONSOLE) as show:
        exported = export_judge(gate, out, kind=numbers, watch=lambda done, total: show(done, total))
    STDERR_CONSOLE.print(Text(_describe(exported)))


def _describe(exported: ExportedJudge) -> str:
    """Say how large the exported judge is, how to use it, and how much its probabilities changed."""
    folder = exported.folder
    text = f"{folder}: the judge takes {exported.megabytes:,.0f} MB. Use it: knowgate ask --gate {folder}"
    if exported.max_deviation is None:
        return f"{text} (first: pip install 'knowgate[llamacpp]')"
    return f"{text}\nOn check questions, a probability changed by at most {exported.max_deviation:.4f}."
