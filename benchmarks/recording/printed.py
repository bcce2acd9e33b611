"""What commands printed where the LLM was, kept beside the recorded runs without the paths of that machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

TABLES = ("ik.md", "ik-judged.md", "latency.md")
FOLDERS = re.compile(r"(?<![\w<])/(?:[^\s/|,:`]+/)+")  # '/some/where/' of '/some/where/log.db'


SMALL = "smollm"  # the other LLM of the self-assessment


def keep_printed(folder: Path, out: Path, llm: str) -> None:
    """Tables as they are; what LLMs said of themselves by LLM, in the place of an earlier record."""
    for name in TABLES:
        if (folder / name).is_file():
            (out / name).write_text(without_folders((folder / name).read_text()))
    for file in sorted(folder.glob("kbsat-*.jsonl")):
        if "." not in file.stem:
            _keep_said(file, out, llm)


def _keep_said(file: Path, out: Path, llm: str) -> None:
    """Of the balanced questions, then of those with other words in them (`kbsat-llm.swapped.jsonl`)."""
    others = sorted(file.parent.glob(f"{file.stem}.*.jsonl"))
    lines = [line for one in (file, *others) for line in one.read_text().splitlines() if line.startswith("{")]
    model = {"kbsat-llm": llm, "kbsat-small": SMALL}.get(file.stem) or json.loads(lines[0])["model"]
    (out / f"kbsat-{model}.json").unlink(missing_ok=True)
    (out / f"kbsat-{model}.jsonl").write_text(without_folders("\n".join(lines)) + "\n")


def without_folders(text: str) -> str:
    return FOLDERS.sub("", text)
