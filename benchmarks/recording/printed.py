"""What commands printed where the LLM was, kept beside the recorded runs without the paths of that machine."""

from __future__ import annotations

import re
from pathlib import Path

TABLES = ("ik.md", "ik-judged.md", "latency.md")
FOLDERS = re.compile(r"(?<![\w<])/(?:[^\s/|,:`]+/)+")  # '/some/where/' of '/some/where/log.db'


def keep_printed(folder: Path, out: Path, llm: str) -> None:
    """Tables as they are; what the LLM said of itself under its name, in the place of an earlier record."""
    for name in TABLES:
        if (folder / name).is_file():
            (out / name).write_text(without_folders((folder / name).read_text()))
    said = [line for file in sorted(folder.glob("kbsat*.jsonl"), key=_place) for line in file.read_text().splitlines()]
    lines = [line for line in said if line.startswith("{")]
    if lines:
        (out / f"kbsat-{llm}.jsonl").write_text(without_folders("\n".join(lines)) + "\n")


def _place(file: Path) -> tuple[int, str]:
    """The balanced questions (`kbsat.jsonl`), then those with other words in them (`kbsat.swapped.jsonl`)."""
    return len(file.suffixes), file.name


def without_folders(text: str) -> str:
    return FOLDERS.sub("", text)
