"""Records to questions: the one format that every source is brought into, and the door where it is checked.

What passes has a text, an id of its own, and lists of texts; choices that all have a letter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from knowgate.doors import shown
from knowgate.errors import BadInput
from knowgate.files import read_jsonl
from knowgate.text import LETTERS
from knowgate.types import Passage, Question

Kind = TypeVar("Kind")
KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}
LONGEST_ID = 1_000  # characters: ids stand in tables and in sentences


def read_file(path: Path) -> Iterator[Question]:
    """The questions of a JSONL file, no two with one id."""
    lines: dict[str, int] = {}
    for number, record in read_jsonl(path):
        question = parse_question(record, f"{path} line {number}", default_id=str(number))
        before = lines.setdefault(question.id, number)
        if before != number:
            own = shown(question.id)
            raise BadInput(f"{path} line {number} has the id {own} of line {before}; ids must be unique.")
        yield question


def parse_question(record: dict[str, Any], where: str, default_id: str) -> Question:
    """A record as a question; what is missing or of the wrong kind is named."""
    text = record.get("question")
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{where}: 'question' is missing or empty. Write it as a text.")
    choices = _strings(record, "choices", where)
    return Question(
        text=text,
        id=default_id if record.get("id") is None else _id(record["id"], where),
        answers=_strings(record, "answers", where),
        lang=_checked(record, "lang", str, where),
        choices=choices,
        contexts=_contexts(record, where),
        meta=_meta(record, choices, where),
    )


def _id(value: object, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise BadInput(f"{where}: 'id' must be a text or a number, not {shown(value)}; leave it out for the line's.")
    text = str(value)
    if len(text) > LONGEST_ID:
        raise BadInput(f"{where}: 'id' has {len(text):,} characters; at most {LONGEST_ID:,} are read.")
    return text


def _checked(record: dict[str, Any], key: str, kind: type[Kind], where: str) -> Kind | None:
    value = record.get(key)
    if value is not None and not isinstance(value, kind):
        raise BadInput(f"{where}: '{key}' must be {KINDS[kind]}, not {shown(value)}.")
    return value


def _strings(record: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    items = _checked(record, key, list, where) or []
    wrong = [item for item in items if not isinstance(item, str | int | float)]
    if wrong:
        raise BadInput(f"{where}: '{key}' must hold texts, not {shown(wrong[0])}.")
    return tuple(str(item) for item in items)


def _meta(record: dict[str, Any], choices: tuple[str, ...], where: str) -> dict[str, Any]:
    """The rest of a record. Choices need a letter each, and so does the right one."""
    if len(choices) > len(LETTERS):
        raise BadInput(f"{where}: there are {len(choices)} choices; at most {len(LETTERS)} have a letter.")
    meta = _checked(record, "meta", dict, where) or {}
    letter = meta.get("gold_letter")
    letters = LETTERS[: len(choices)]
    if choices and letter and str(letter).strip().upper() not in tuple(letters):
        raise BadInput(f"{where}: 'gold_letter' is {shown(letter)}; the choices have {', '.join(letters)}.")
    return meta


def _contexts(record: dict[str, Any], where: str) -> tuple[Passage, ...]:
    passages = []
    for number, item in enumerate(_checked(record, "contexts", list, where) or []):
        if not isinstance(item, dict) or not isinstance(item.get("text"), str):
            raise BadInput(f"{where}: each of 'contexts' must be an object with a 'text'.")
        name = number if item.get("id") is None else _id(item["id"], f"{where}, context {number + 1}")
        title = _checked(item, "title", str, f"{where}, context {number + 1}")
        passages.append(Passage(str(name), item["text"], title or ""))
    return tuple(passages)
