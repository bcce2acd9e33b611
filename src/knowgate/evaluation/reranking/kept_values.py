"""A file of values by key that grows as they come, so that work which was stopped, even killed, goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from knowgate.files import read_jsonl


def read_kept(file: Path, name: str) -> dict[str, Any]:
    """What is in the file, by key; a line that was being written when the process died is cut off."""
    if not file.is_file():
        return {}
    _mend(file)
    return {str(record["key"]): record[name] for _, record in read_jsonl(file)}


def add_kept(file: Path, name: str, values: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"key": key, name: value}, ensure_ascii=False) + "\n" for key, value in values.items()]
    with file.open("a", encoding="utf-8", newline="\n") as end:
        end.writelines(lines)


def _mend(file: Path) -> None:
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(file, whole)
