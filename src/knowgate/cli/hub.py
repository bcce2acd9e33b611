"""`knowgate push` and `knowgate pull`: fitted gates, arbiters and rerankers for others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.cli.options import parse_path
from knowgate.integrations.hub import pull_artifact as fetch_from
from knowgate.integrations.hub import push_artifact as send_to


def push(
    folder: Annotated[Path, typer.Argument(parser=parse_path, metavar="DIR", help="Fitted gate, arbiter or reranker.")],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="hf:OWNER/NAME of the Hugging Face hub, or a folder.")
    ],
    public: Annotated[
        bool, typer.Option("--public", help="A new repository is for everybody; else it is private.")
    ] = False,
    questions: Annotated[
        bool, typer.Option("--with-questions", help="Also the ten questions that a server's states are checked by.")
    ] = False,
) -> None:
    """Put what was fitted where others find it: the Hugging Face hub (token: HF_TOKEN), or a shared folder.

    Example: knowgate push my-gate hf:acme/faq-gate
    """
    where = send_to(folder, target, public=public, questions=questions)
    STDERR_CONSOLE.print(f"{folder} is at {where}. Fetch it: knowgate pull {where} --out {folder.name}")


def pull(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="hf:OWNER/NAME of the Hugging Face hub, or a folder.")
    ],
    out: Annotated[Path, typer.Option(parser=parse_path, metavar="DIR", help="Where it goes.")],
    revision: Annotated[
        str | None, typer.Option(help="Of the hub: a branch, tag or commit. Default: the newest.")
    ] = None,
) -> None:
    """Fetch what somebody pushed; it is checked before it is anywhere.

    Example: knowgate pull hf:acme/faq-gate --out faq-gate
    """
    place = fetch_from(source, out, revision=revision)
    STDERR_CONSOLE.print(f"{source} is at {place}. Use it: --gate {place} (or --arbiter, --rerank, as it is)")
