"""`knowgate demo`: a tour of three minutes that shows what a gate does.

The tour takes seconds to import, so the introduction is printed first.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from knowgate.cli.console import create_console
from knowgate.core.options import Count, Options, option

INTRODUCTION = "knowgate: an LLM searches where it must, and not where it knows."


class DemoOptions(Options):
    """Options of `knowgate demo`."""

    model: str = option("smollm", "LLM to use. Default: smollm, which comes with knowgate.")
    gate: str = option("default", "Gate that decides whether to search; see: knowgate gates")
    threshold: float | None = option(
        None, "Search if the gate's score is above this threshold. Default: the threshold of the gate."
    )
    limit: Count | None = option(None, "Use only the first N messages.")
    search_seconds: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] | None = option(
        None, "Seconds that each search waits, to imitate a hosted search. Default: the same as for `knowgate eval`."
    )
    quick: bool = option(False, "Show only the first question, or recorded results if no LLM can run.", flag="--quick")


def demo(options: DemoOptions) -> None:
    """Take a tour of three minutes (on two cores).

    It answers one question with and without a search. Then it answers messages in three modes: never searching, always
    searching, and as the gate decides. Last come measured results of an 8B LLM and commands to type next.
    """
    console = create_console()
    console.print(INTRODUCTION, style="bold")

    from knowgate.cli.demo.tour import run_quick_tour, run_tour

    if options.quick:
        run_quick_tour(options, console)
    else:
        run_tour(options, console)
