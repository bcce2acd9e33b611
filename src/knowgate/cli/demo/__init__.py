"""`knowgate demo`: prints what it is about at once; the tour, which takes seconds to load, is imported afterwards."""

from __future__ import annotations

from typing import Annotated

import typer

from knowgate.cli.console import create_console
from knowgate.core.validation import check_integer, check_number

MAX_SEARCH_SECONDS = 10.0
INTRODUCTION = "knowgate: an LLM searches where it must, and not where it knows."


def demo(
    model: Annotated[str, typer.Option(help="Any model spec; the embedded one by default.")] = "smollm",
    gate: Annotated[str, typer.Option(help="Any gate spec.")] = "default",
    threshold: Annotated[float | None, typer.Option(help="Search if the need is above this.")] = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first messages, this many.")] = None,
    search_seconds: Annotated[
        float | None,
        typer.Option(help="How long each search waits, as real ones do. Default: what `eval` assumes."),
    ] = None,
) -> None:
    """Take a tour of three minutes.

    It shows one question with and without a search, a stream of messages answered never, always and gated, recorded
    results of an 8B LLM, and what to type next.
    """
    if limit is not None:
        check_integer(limit, "limit")
    if search_seconds is not None:
        check_number(search_seconds, "search_seconds", maximum=MAX_SEARCH_SECONDS)
    console = create_console()
    console.print(INTRODUCTION, style="bold")

    from knowgate.cli.demo.tour import DemoTour

    DemoTour(model, gate, threshold, limit, search_seconds).run(console)
