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
        typer.Argument(parser=parse_path, metavar="GATE", help="Folder of a fitted gate: judge, gain or ik (lora)."),
    ],
    out: Annotated[
        Path,
        typer.Option(parser=parse_path, metavar="DIR", help="Folder to write the new gate to."),
    ],
    numbers: Annotated[
        Literal["q8_0", "f16"], typer.Option(help="Number format of the weights: 8 bits, or 16 bits at twice the size.")
    ] = "q8_0",
) -> None:
    """Copy a gate and convert its judge (a fine-tuned model) to a GGUF file, which llama.cpp runs.

    The new gate needs less memory and no torch, but it needs the extra llamacpp. Judges based on Llama and Qwen2 models
    can be exported. A guarantee is not copied: run knowgate calibrate on the new gate.

    Example: knowgate export-judge my-judge --out my-fast-judge
    """
    with show_progress("writing the judge", "tensors", STDERR_CONSOLE) as show:
        exported = export_judge(gate, out, kind=numbers, watch=lambda done, total: show(done, total))
    STDERR_CONSOLE.print(Text(_describe(exported)))


def _describe(exported: ExportedJudge) -> str:
    """Describe the size of the exported judge, how to use it, and how much its probabilities changed."""
    folder = exported.folder
    text = f"Exported to {folder}; the judge takes {exported.megabytes:,.0f} MB. Use it: knowgate ask --gate {folder}"
    if exported.max_deviation is None:
        return f"{text} (first: pip install 'knowgate[llamacpp]')"
    return f"{text}\nOn check questions, the judge's probabilities changed by at most {exported.max_deviation:.4f}."
