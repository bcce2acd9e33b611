"""Answers and decisions in a few words, and as HTML for notebooks. Knows no record: takes what they hold."""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.markup import table

WIDTH = 80


def verdict(retrieve: bool) -> str:
    return "retrieve" if retrieve else "skip"


def short(text: str, width: int = WIDTH) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def facts_html(facts: Sequence[tuple[str, str]]) -> str:
    """Names and what they are, one below the other."""
    return table(("", ""), facts)
