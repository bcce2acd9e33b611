"""`knowgate export-judge`: a gate's judge as a GGUF file, which llama.cpp runs."""

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
        Path, typer.Argument(parser=parse_path, metavar="GATE", help="Folder of a fitted judge, or ik (lora).")
    ],
    out: Annotated[
        Path,
        typer.Option(
            parser=parse_path, metavar="DIR", help="Folder of the new gate; its adapter/judge.gguf is the judge."
        ),
    ],
    numbers: Annotated[
        Literal["q8_0", "f16"], typer.Option(help="How weights are written: 8 bits, or 16 and twice the size.")
    ] = "q8_0",
) -> None:
    """Write a gate anew, its judge merged into one GGUF file that llama.cpp runs: in less memory, and without torch.

    For bases of the kinds Llama and Qwen2. To run it the extra llamacpp is needed.

    Example: knowgate export-judge my-judge --out my-fast-judge
    """
    with show_progress("writing the judge", "tensors", STDERR_CONSOLE) as show:
        made = export_judge(gate, out, kind=numbers, watch=lambda done, total: show(done, total))
    STDERR_CONSOLE.print(Text(_told(made)))


def _told(made: ExportedJudge) -> str:
    said = f"{made.folder}: the judge takes {made.megabytes:,.0f} MB. Use it: knowgate ask --gate {made.folder}"
    if made.off_by is None:
        return f"{said} (first: pip install 'knowgate[llamacpp]')"
    return f"{said}\nOn what it was asked before and after, a probability moved by at most {made.off_by:.4f}."
