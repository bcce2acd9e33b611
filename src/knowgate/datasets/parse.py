"""Records to questions: the one format that every source is brought into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from knowgate.errors import BadInput
from knowgate.files import read_jsonl
from knowgate.types import Passage, Question

Kind = TypeVar("Kind")
KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}


def read_file(path: Path) -> Iterator[Question]:
    """The questions of a JSONL file."""
    for number, record in read_jsonl(path):
        yield parse_question(record, f"{path} line {number}", default_id=str(number))


def parse_question(record: dict[str, Any], where: str, default_id: str) -> Question:
    """A record as a question; what is missing or of the wrong kind is named."""
    text = record.get("question")
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{where}: 'question' is missing or empty.")
    return Question(
        text=text,
        id=default_id if record.get("id") is None else str(record["id"]),
        answers=_strings(record, "answers", where),
        lang=_checked(record, "lang", str, where),
        choices=_strings(record, "choices", where),
        contexts=_contexts(record, where),
        meta=_checked(record, "meta", dict, where) or {},
    )


def _checked(record: dict[str, Any], key: str, kind: type[Kind], where: str) -> Kind | None:
    value = record.get(key)
    if value is not None and not isinstance(value, kind):
        raise BadInput(f"{where}: '{key}' must be {KINDS[kind]}, not {value!r}.")
    return value


def _strings(record: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    return tuple(str(item) for item in _checked(record, key, list, where) or [])


def _contexts(record: dict[str, Any], where: str) -> tuple[Passage, ...]:
    passages = []
    for number, item in enumerate(_checked(record, "contexts", list, where) or []):
        if not isinstance(item, dict) or not isinstance(item.get("text"), str):
            raise BadInput(f"{where}: each of 'contexts' must be an object with a 'text'.")
        passages.append(Passage(str(item.get("id", number)), item["text"], str(item.get("title") or "")))
    return tuple(passages)
