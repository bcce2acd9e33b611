"""`knowgate demo`: a tour of three minutes that shows what a gate does.

The tour takes seconds to import, so the introduction is printed first.
"""

from __future__ import annotations

from typing import Annotated

import typer

from knowgate.cli.console import create_console
from knowgate.core.validation import check_integer, check_number

MAX_SEARCH_SECONDS = 10.0
INTRODUCTION = "knowgate: an LLM searches where it must, and not where it knows."


def demo(
    model: Annotated[str, typer.Option(help="LLM to use. Default: the embedded one.")] = "smollm",
    gate: Annotated[str, typer.Option(help="Gate that decides whether to search; see: knowgate gates")] = "default",
    threshold: Annotated[
        float | None, typer.Option(help="Search if the gate's score is above this (0: the LLM knows, 1: search).")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first N messages.")] = None,
    search_seconds: Annotated[
        float | None,
        typer.Option(
            help="Seconds that each search waits, to imitate a hosted search. Default: as in `knowgate eval`."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Show only the first question, or recorded results if no LLM is installed.")
    ] = False,
) -> None:
    """Take a tour of three minutes (on two cores).

    It shows one question answered with and without a search; a stream of messages answered in three modes (never
    searching, always searching, and as the gate decides); measured results of an 8B LLM; and what
    to type next.
    """
    if limit is not None:
        check_integer(limit, "limit")
    if search_seconds is not None:
        check_number(search_seconds, "search_seconds", maximum=MAX_SEARCH_SECONDS)
    console = create_console()
    console.print(INTRODUCTION, style="bold")

    from knowgate.cli.demo.tour import DemoTour

    tour = DemoTour(model, gate, threshold, limit, search_seconds)
    if quick:
        tour.run_quick(console)
    else:
        tour.run(console)
