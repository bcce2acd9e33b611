"""The Markdown pages of the project (README, CONTRIBUTING, docs) and the code blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.structure import ROOT

FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)
EXAMPLES = ROOT / "docs" / "examples"


@dataclass(frozen=True)
class Block:
    """A fenced code block with its page, line, language and text."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Return README, CONTRIBUTING and every page of the documentation."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[Block]:
    """Return all code blocks in one language."""
    return [block for page in pages() for block in _blocks(page) if block.language == language]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        code = "".join(line.removeprefix(match[1]) for line in match[3].splitlines(keepends=True))
        yield Block(page, text.count("\n", 0, match.start()) + 1, match[2], code)


def inline_code() -> list[tuple[str, str]]:
    """Return page name and text of every piece of inline code."""
    pieces = []
    for page in pages():
        prose = FENCE.sub("", page.read_text(encoding="utf-8"))
        pieces += [(page.name, text) for text in re.findall(r"`([^`\n]+)`", prose)]
    return pieces
