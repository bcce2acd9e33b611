"""`knowgate push` and `knowgate pull`: share fitted gates, arbiters and rerankers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.cli.options import parse_path
from knowgate.integrations.hub import pull_artifact, push_artifact

ADDRESS_HELP = "hf:OWNER/NAME of the Hugging Face hub, or a folder."


def push(
    folder: Annotated[Path, typer.Argument(parser=parse_path, metavar="DIR", help="Fitted gate, arbiter or reranker.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help=ADDRESS_HELP)],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public instead of private.")] = False,
    questions: Annotated[
        bool, typer.Option("--with-questions", help="Include the ten questions that check a server's hidden states.")
    ] = False,
) -> None:
    """Upload what you fitted to the Hugging Face hub (token: HF_TOKEN), or copy it to a shared folder.

    Example: knowgate push my-gate hf:acme/faq-gate
    """
    address = push_artifact(folder, target, public=public, questions=questions)
    STDERR_CONSOLE.print(f"{folder} is at {address}. Download it: knowgate pull {address} --out {folder.name}")


def pull(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=ADDRESS_HELP)],
    out: Annotated[Path, typer.Option(parser=parse_path, metavar="DIR", help="Folder to write.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub. Default: the newest.")] = None,
) -> None:
    """Download what somebody pushed; it is checked before it is stored.

    Example: knowgate pull hf:acme/faq-gate --out faq-gate
    """
    folder = pull_artifact(source, out, revision=revision)
    STDERR_CONSOLE.print(f"{source} is in {folder}. Use it: --gate {folder} (or --arbiter, --rerank)")
