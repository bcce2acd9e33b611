"""`knowgate push`, `knowgate pull` and `knowgate export-judge`: share and export what was fitted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from knowgate.cli.console import inform
from knowgate.cli.options import path_argument, path_option
from knowgate.cli.progress import show_progress
from knowgate.core.options import Options, option
from knowgate.core.registry import load_target
from knowgate.integrations.hub import pull_artifact, push_artifact

JUDGE_EXPORT = "knowgate.training.judges.gguf_export:export_judge"  # needs torch; push and pull do not


def export_judge_command(
    gate: Annotated[Path, path_argument("GATE", "Folder of a fitted gate: judge, gain or ik (lora).")],
    out: Annotated[Path, path_option("DIR", "Folder to write the new gate to.")],
    numbers: Annotated[
        Literal["q8_0", "f16"],
        typer.Option(help="Number format: `q8_0` (8 bits) or `f16` (16 bits, twice the size)."),
    ] = "q8_0",
) -> None:
    """Copy a gate and convert its judge (a fine-tuned model) to a GGUF file for llama.cpp.

    The new gate needs less memory and no torch, but it needs the extra llamacpp. Judges based on Llama and Qwen2 models
    can be exported. A guarantee is not copied. To get one, run knowgate calibrate on the new gate.

    Example: knowgate export-judge my-judge --out my-fast-judge
    """
    export_judge = load_target(JUDGE_EXPORT, "exporting a judge", "train")
    with show_progress("writing the judge", "tensors") as show:
        exported = export_judge(gate, out, kind=numbers, watch=show)
    folder = exported.folder
    inform(f"Exported to {folder}; the judge takes {exported.megabytes:,.0f} MB. Use it: knowgate ask --gate {folder}")
    if exported.max_deviation is None:  # llama.cpp is not installed, so the new judge could not be measured
        inform("First: pip install 'knowgate[llamacpp]'")
    else:
        inform(f"On check questions, the judge's probabilities changed by at most {exported.max_deviation:.4f}.")


ADDRESS_HELP = "Shared location: hf:OWNER/NAME for the Hugging Face hub, or a folder."


class PushOptions(Options):
    """Options of `knowgate push`."""

    public: bool = option(False, "Make a new hub repository public instead of private.", flag="--public")
    with_questions: bool = option(
        False,
        "Include ten sample questions. They test whether a server returns the same hidden states.",
        flag="--with-questions",
    )


def push(
    folder: Annotated[Path, path_argument("DIR", "Folder of a fitted gate, arbiter or reranker.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help=ADDRESS_HELP)],
    options: PushOptions,
) -> None:
    """Upload a fitted gate, arbiter or reranker to the Hugging Face hub or a shared folder.

    The hub needs an access token in the environment variable HF_TOKEN.

    Example: knowgate push my-gate hf:acme/faq-gate
    """
    address = push_artifact(folder, target, public=options.public, questions=options.with_questions)
    inform(f"{folder} is at {address}. Download it: knowgate pull {address} --out {folder.name}")


def pull(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=ADDRESS_HELP)],
    out: Annotated[Path, path_option("DIR", "Folder to write the download to.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the hub repository. Default: the newest.")
    ] = None,
) -> None:
    """Download a gate, arbiter or reranker from the Hugging Face hub or a shared folder.

    The files are checked first.

    Example: knowgate pull hf:acme/faq-gate --out faq-gate
    """
    folder = pull_artifact(source, out, revision=revision)
    inform(f"{source} is in {folder}. Use it: --gate {folder} (or --arbiter, --rerank)")
