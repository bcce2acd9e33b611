"""The pages people read (README, CONTRIBUTING, docs) and the blocks of code in them. Runs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.house import ROOT

FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)
EXAMPLES = ROOT / "docs" / "examples"


@dataclass(frozen=True)
class Block:
    """A block of code: where it stands, in which language, and what it says."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[Block]:
    return [block for page in pages() for block in _blocks(page) if block.language == language]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        inside = "".join(line.removeprefix(found[1]) for line in found[3].splitlines(keepends=True))
        yield Block(page, text.count("\n", 0, found.start()) + 1, found[2], inside)


def inline_code() -> list[tuple[str, str]]:
    """(page, text) of every piece of code within a line."""
    found = []
    for page in pages():
        prose = FENCE.sub("", page.read_text(encoding="utf-8"))
        found += [(page.name, text) for text in re.findall(r"`([^`\n]+)`", prose)]
    return found
