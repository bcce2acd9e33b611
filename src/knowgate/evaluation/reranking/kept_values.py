"""A file of values by key that grows as they come, so that work which was stopped, even killed, goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from knowgate.files import read_jsonl, whole_lines
from knowgate.typed import read_record

Kept = TypeVar("Kept")


def read_kept(file: Path, kind: type[Kept]) -> list[Kept]:
    """What is in the file; a line that was being written when the process died is cut off."""
    if not file.is_file():
        return []
    os.truncate(file, whole_lines(file))
    return [read_record(kind, record, f"{file} line {line}") for line, record in read_jsonl(file)]


def add_kept(file: Path, name: str, values: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"key": key, name: value}, ensure_ascii=False) + "\n" for key, value in values.items()]
    with file.open("a", encoding="utf-8", newline="\n") as end:
        end.writelines(lines)
