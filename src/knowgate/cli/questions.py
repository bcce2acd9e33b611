"""Questions from the arguments, or one per line from standard input."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from knowgate.errors import BadInput


def read_arguments(questions: list[str] | None) -> Iterable[str]:
    """Questions from the arguments, else one per line from standard input. What is wrong at once is said at once."""
    if questions:
        return [_checked(question) for question in questions]
    if sys.stdin is None or sys.stdin.isatty():
        raise BadInput("no question given: write it as an argument, or pipe questions in, one per line.")
    lines = _lines(sys.stdin.buffer)
    first = next(lines)  # says that nothing came in before a model is loaded for it
    return chain([first], lines)


def read_lines(file: Path) -> Iterator[str]:
    """Questions from a file, one per line."""
    with file.open("rb") as lines:
        yield from _lines(lines, f"'{file}'")


def _lines(lines: Iterable[bytes], where: str = "standard input") -> Iterator[str]:
    found = False
    for number, line in enumerate(lines, start=1):
        text = _decoded(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, number, where).strip()
        if text:
            found = True
            yield text
    if not found:
        came = "came in on" if where == "standard input" else "stands in"
        raise BadInput(f"no question {came} {where}: write one per line.")


def _decoded(line: bytes, number: int, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise BadInput(f"line {number} of {where} is not UTF-8 text: convert it, as with iconv.") from None


def _checked(text: str) -> str:
    """Not empty, and whole characters: bytes that are not UTF-8 arrive as halves."""
    if not text.strip():
        raise BadInput("the question is empty: ask something.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(f"the question is not UTF-8 text: {text[:60]!a}. Type it in a UTF-8 terminal.") from None
    return text
