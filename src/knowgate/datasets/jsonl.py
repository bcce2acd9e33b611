"""Questions from a JSONL file (or .jsonl.gz), one object per line.

{"question": ..., "id"?, "answers"?: [..], "lang"?, "choices"?: [..], "contexts"?: [{"id"?, "title"?, "text"}], "meta"?}
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from knowgate.errors import BadInput
from knowgate.files import read_jsonl
from knowgate.types import Passage, Question


def read_questions(file: str) -> Iterator[Question]:
    path = Path(file).expanduser()
    if not path.is_file():
        raise BadInput(f"there is no file '{path}'.")
    for number, record in read_jsonl(path):
        yield parse(record, f"{path} line {number}", default_id=str(number))


def parse(record: dict[str, Any], where: str, default_id: str) -> Question:
    """A record as a question; what is missing or of the wrong kind is named."""
    text = record.get("question")
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{where}: 'question' is missing or empty.")
    return Question(
        text=text,
        id=str(record.get("id", default_id)),
        answers=_strings(record, "answers", where),
        lang=record.get("lang"),
        choices=_strings(record, "choices", where),
        contexts=_contexts(record, where),
        meta=record.get("meta") or {},
    )


def _strings(record: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = record.get(key) or []
    if not isinstance(value, list):
        raise BadInput(f"{where}: '{key}' must be a list.")
    return tuple(str(item) for item in value)


def _contexts(record: dict[str, Any], where: str) -> tuple[Passage, ...]:
    passages = []
    for number, item in enumerate(record.get("contexts") or []):
        if not isinstance(item, dict) or not isinstance(item.get("text"), str):
            raise BadInput(f"{where}: each of 'contexts' must be an object with a 'text'.")
        passages.append(Passage(str(item.get("id", number)), item["text"], str(item.get("title") or "")))
    return tuple(passages)
