"""`knowgate push` and `knowgate pull`: share fitted gates, arbiters and rerankers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.cli.options import parse_path
from knowgate.integrations.hub import pull_artifact, push_artifact

ADDRESS_HELP = "Shared location: hf:OWNER/NAME for the Hugging Face hub, or a folder."


def push(
    folder: Annotated[
        Path, typer.Argument(parser=parse_path, metavar="DIR", help="Folder of a fitted gate, arbiter or reranker.")
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help=ADDRESS_HELP)],
    public: Annotated[
        bool, typer.Option("--public", help="Make a new hub repository public instead of private.")
    ] = False,
    questions: Annotated[
        bool,
        typer.Option(
            "--with-questions",
            help="Include the ten sample questions of the gate, which check a server's hidden states.",
        ),
    ] = False,
) -> None:
    """Upload a fitted gate, arbiter or reranker to the Hugging Face hub, or copy it to a shared folder.

    The hub needs an access token in the environment variable HF_TOKEN.

    Example: knowgate push my-gate hf:acme/faq-gate
    """
    address = push_artifact(folder, target, public=public, questions=questions)
    STDERR_CONSOLE.print(f"{folder} is at {address}. Download it: knowgate pull {address} --out {folder.name}")


def pull(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=ADDRESS_HELP)],
    out: Annotated[Path, typer.Option(parser=parse_path, metavar="DIR", help="Folder to write the download to.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the hub repository. Default: the newest.")
    ] = None,
) -> None:
    """Download a gate, arbiter or reranker that was uploaded with `knowgate push`.

    The files are checked before they are stored.

    Example: knowgate pull hf:acme/faq-gate --out faq-gate
    """
    folder = pull_artifact(source, out, revision=revision)
    STDERR_CONSOLE.print(f"{source} is in {folder}. Use it: --gate {folder} (or --arbiter, --rerank)")
