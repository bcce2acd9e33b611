"""Docstrings as they stand in this code, made into Markdown.

A line `word: meaning` (or `Needs: ...`) becomes an item of a list with the lines that go on from it; an example is
shown as code. griffe calls `PlainDocstrings` for everything the reference describes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import griffe

ITEM = re.compile(r"(\w+(?:(?: / |, | )\w+){0,3}): (?=\S)")  # a name or a few; more words are a sentence
LATER_ITEM = re.compile(r"(?<=[.;)]) (?=(?:[a-z_]+|Cost per question): )")  # one that begins within a line
EXAMPLE = re.compile(r"^Examples?:$", flags=re.MULTILINE)


class PlainDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    told, *examples = EXAMPLE.split(text, maxsplit=1)
    parts = [*_told(told), *(f"```pycon\n{_code(example)}\n```" for example in examples)]
    return "\n\n".join(part for part in parts if part.strip())


def _code(example: str) -> str:
    return inspect.cleandoc(example.strip("\n")).replace("  # doctest: +SKIP", "")


def _told(text: str) -> Iterator[str]:
    """The first paragraph is a sentence, whatever it looks like."""
    first, *others = re.split(r"\n\s*\n", text.strip())
    yield first
    for paragraph in others:
        yield paragraph if _is_markdown(paragraph) else "\n".join(_lines(paragraph))


def _is_markdown(paragraph: str) -> bool:
    """Tables, lists and code are left as they are."""
    return paragraph.lstrip().startswith(("|", "- ", "```", ">>>")) or paragraph.startswith("    ")


def _lines(paragraph: str) -> Iterator[str]:
    """Items of a list, set off from the sentences before them."""
    listing = False
    for number, line in enumerate(LATER_ITEM.sub("\n", paragraph).splitlines()):
        item = ITEM.match(line)
        if item and number and not listing:
            yield ""
        listing = listing or bool(item)
        if item:
            yield f"- **{item[1]}**: {line[item.end() :]}"
        else:
            yield f"  {line}" if listing else line
