"""`knowgate demo`: says what it is about at once, then gives the tour; what the tour needs takes seconds to load."""

from __future__ import annotations

from typing import Annotated

import typer

from knowgate.cli.console import plain_console
from knowgate.doors import check_whole, check_within

LONGEST_SEARCH = 10.0
ABOUT = "knowgate: an LLM searches where it must, and not where it knows."


def demo(
    model: Annotated[str, typer.Option(help="Any model spec; the embedded one by default.")] = "smollm",
    gate: Annotated[str, typer.Option(help="Any gate spec.")] = "default",
    threshold: Annotated[float | None, typer.Option(help="Search when need is above this.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many messages.")] = None,
    search_seconds: Annotated[
        float | None,
        typer.Option(help="How long each search waits, as real ones do. Default: as `eval` assumes."),
    ] = None,
) -> None:
    """A tour in three minutes: one question two ways, a stream of messages answered never, always and gated, what
    records say of an 8B LLM, and what to type next."""
    if limit is not None:
        check_whole(limit, "the limit")
    if search_seconds is not None:
        check_within(search_seconds, "--search-seconds", most=LONGEST_SEARCH)
    console = plain_console()
    console.print(ABOUT, style="bold")

    from knowgate.cli.demo_tour import Tour

    Tour(model, gate, threshold, limit, search_seconds).give(console)
