"""Copy the tables that commands printed, without the folder paths of the machine where they ran."""

from __future__ import annotations

import re
from pathlib import Path

TABLES = ("ik.md", "ik-judged.md", "latency.md")
FOLDERS = re.compile(r"(?<![\w<])/(?:[^\s/|,:`]+/)+")  # matches '/some/where/' in '/some/where/log.db'


def copy_printed_tables(folder: Path, out: Path, llm: str) -> None:
    """Copy tables as they are, and merge the self-assessments of an LLM into one file, replacing an earlier one."""
    for name in TABLES:
        if (folder / name).is_file():
            (out / name).write_text(remove_folders((folder / name).read_text()))
    files = sorted(folder.glob("kbsat*.jsonl"), key=_sort_key)
    lines = [line for file in files for line in file.read_text().splitlines() if line.startswith("{")]
    if lines:
        (out / f"kbsat-{llm}.jsonl").write_text(remove_folders("\n".join(lines)) + "\n")


def _sort_key(file: Path) -> tuple[int, str]:
    """Sort the balanced questions (`kbsat.jsonl`) before their variants (such as `kbsat.swapped.jsonl`)."""
    return len(file.suffixes), file.name


def remove_folders(text: str) -> str:
    """Remove folder paths; file names remain."""
    return FOLDERS.sub("", text)
