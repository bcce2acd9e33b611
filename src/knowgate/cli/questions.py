"""Questions from the arguments, or one per line from standard input or a file. Each knows its number."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from knowgate.core.files import read_jsonl
from knowgate.data.questions import is_jsonl_file
from knowgate.errors import BadInput
from knowgate.types import Question

TEXT_KEYS = ("question", "text", "messages")


def read_messages(file: Path) -> Iterator[Question]:
    """One for each line that is not empty, called by its number."""
    for number, record in read_jsonl(file):
        yield Question(_said(record, f"{file} line {number}"), str(number))


def _said(record: Mapping[str, Any], where: str) -> str:
    key = next((key for key in TEXT_KEYS if key in record), None)
    if key is None:
        raise BadInput(f"{where} says nothing: it has none of the keys {', '.join(TEXT_KEYS)}. Write one of them.")
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


STDIN = "standard input"


@dataclass
class QuestionStream:
    """Questions in their order, numbered from 1 as their lines are; `skipped`: the numbers of lines that are empty."""

    questions: Iterator[Question]
    skipped: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[Question]:
        return self.questions

    def skipped_before(self, number: int | None = None) -> list[int]:
        """Empty lines before this one (None: all) that were not told yet."""
        told = [one for one in self.skipped if number is None or one < number]
        del self.skipped[: len(told)]  # the reader of the lines adds to the same list
        return told


def read_arguments(questions: list[str] | None) -> QuestionStream:
    """Questions from the arguments, else one per line from standard input. What is wrong at once is said at once."""
    if questions:
        checked = [_checked(question) for question in questions]
        alone = len(checked) == 1
        return QuestionStream(
            Question(text, "" if alone else str(number)) for number, text in enumerate(checked, start=1)
        )
    if sys.stdin is None or sys.stdin.isatty():
        raise BadInput("no question given: write it as an argument, or pipe questions in, one per line.")
    return _read(sys.stdin.buffer, STDIN)


def read_question_file(file: Path) -> QuestionStream:
    """Questions from a file, one per line; JSON lines by its ending."""
    return QuestionStream(read_messages(file)) if is_jsonl_file(str(file)) else _read(_lines_of(file), f"'{file}'")


def _lines_of(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        yield from lines


def _read(lines: Iterable[bytes], where: str) -> QuestionStream:
    asked = QuestionStream(iter(()))
    found = _numbered(lines, where, asked.skipped)
    first = next(found)  # says that nothing came in before a model is loaded for it
    asked.questions = chain([first], found)
    return asked


def _numbered(lines: Iterable[bytes], where: str, skipped: list[int]) -> Iterator[Question]:
    found = False
    for number, line in enumerate(lines, start=1):
        text = _decoded(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, number, where).strip()
        if text:
            found = True
            yield Question(text, str(number))
        else:
            skipped.append(number)
    if not found:
        came = "came in on" if where == STDIN else "stands in"
        raise BadInput(f"no question {came} {where}: write one per line.")


def _decoded(line: bytes, number: int, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise BadInput(f"line {number} of {where} is not UTF-8 text: convert it, as with iconv.") from None


def _checked(text: str) -> str:
    """Not empty, and whole characters: bytes that are not UTF-8 arrive as halves."""
    if not text.strip():
        raise BadInput("the question is empty: ask something.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(f"the question is not UTF-8 text: {text[:60]!a}. Type it in a UTF-8 terminal.") from None
    return text
