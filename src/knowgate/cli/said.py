"""What was said, in a JSONL file of traffic: `question`, `text`, or the last words of the user in `messages`.

Knows records; not what is done with the words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from knowgate.errors import BadInput
from knowgate.files import read_jsonl
from knowgate.types import Question

KEYS = ("question", "text", "messages")


def said_in(file: Path) -> Iterator[Question]:
    """One for each line that is not empty, called by its number."""
    for number, record in read_jsonl(file):
        yield Question(_said(record, f"{file} line {number}"), str(number))


def _said(record: Mapping[str, Any], where: str) -> str:
    key = next((key for key in KEYS if key in record), None)
    if key is None:
        raise BadInput(f"{where} says nothing: it has none of the keys {', '.join(KEYS)}. Write one of them.")
    text = _last(record[key], where) if key == "messages" else record[key]
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{where}: '{key}' is empty or no text. Write what was said there.")
    return text


def _last(messages: object, where: str) -> object:
    spoken = messages if isinstance(messages, list) else []
    users = [one.get("content") for one in spoken if isinstance(one, dict) and one.get("role") == "user"]
    if not users:
        raise BadInput(f"{where}: 'messages' must be a list of objects with 'role' and 'content', one by the user.")
    return users[-1]
