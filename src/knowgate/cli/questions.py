"""Questions of a command: from its arguments, from standard input, or from a file, one per line."""

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

STDIN = "standard input"
TEXT_KEYS = ("question", "text", "messages")  # of a line of a traffic log


@dataclass
class QuestionStream:
    """Questions with their line numbers, counted from 1, as ids.

    Attributes:
        questions: The questions, read while they are iterated.
        skipped: Numbers of empty lines, filled while reading.
    """

    questions: Iterator[Question]
    skipped: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[Question]:
        return self.questions

    def take_skipped(self, before: int | None = None) -> list[int]:
        """Return the empty lines before a line (None: all) that were not returned yet."""
        numbers = [number for number in self.skipped if before is None or number < before]
        del self.skipped[: len(numbers)]  # the reader appends to the same list
        return numbers


def read_arguments(questions: list[str] | None) -> QuestionStream:
    """Read questions from the arguments, else one per line from standard input."""
    if questions:
        texts = [_check_argument(question) for question in questions]
        is_single = len(texts) == 1
        return QuestionStream(
            Question(text, "" if is_single else str(number)) for number, text in enumerate(texts, start=1)
        )
    if sys.stdin is None or sys.stdin.isatty():
        raise BadInput("no question given. Write it as an argument, or pipe questions in, one per line.")
    return _read_stream(sys.stdin.buffer, STDIN)


def read_question_file(file: Path) -> QuestionStream:
    """Read questions from a file, one per line; JSON lines by its suffix."""
    return (
        QuestionStream(read_messages(file))
        if is_jsonl_file(str(file))
        else _read_stream(_open_lines(file), f"'{file}'")
    )


def _open_lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        yield from lines


def _read_stream(lines: Iterable[bytes], where: str) -> QuestionStream:
    stream = QuestionStream(iter(()))
    questions = _read_questions(lines, where, stream.skipped)
    first = next(questions)  # raises for empty input before a model is loaded
    stream.questions = chain([first], questions)
    return stream


def _read_questions(lines: Iterable[bytes], where: str, skipped: list[int]) -> Iterator[Question]:
    """Yield a question for each line that is not empty; collect the numbers of empty lines."""
    is_empty = True
    for number, line in enumerate(lines, start=1):
        text = _decode(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, number, where).strip()
        if text:
            is_empty = False
            yield Question(text, str(number))
        else:
            skipped.append(number)
    if is_empty:
        raise BadInput(f"no question in {where}. Write one per line.")


def _decode(line: bytes, number: int, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise BadInput(f"line {number} of {where} is not UTF-8 text. Convert it, for example with iconv.") from None


def _check_argument(text: str) -> str:
    """Return a question that is not empty and valid UTF-8; invalid bytes arrive as surrogates."""
    if not text.strip():
        raise BadInput("the question is empty. Type one.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(f"the question is not UTF-8 text: {text[:60]!a}. Type it in a UTF-8 terminal.") from None
    return text


# --- traffic logs ---------------------------------------------------------------------------------


def read_messages(file: Path) -> Iterator[Question]:
    """Read a JSONL file of traffic: `question`, `text`, or the last user message in `messages` of each line."""
    for number, record in read_jsonl(file):
        yield Question(_get_text(record, f"{file} line {number}"), str(number))


def _get_text(record: Mapping[str, Any], where: str) -> str:
    """Return the question of a traffic record."""
    key = next((key for key in TEXT_KEYS if key in record), None)
    if key is None:
        raise BadInput(f"{where} has none of the keys {', '.join(TEXT_KEYS)}. Write one of them.")
    text = _get_last_user_message(record[key], where) if key == "messages" else record[key]
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{where}: '{key}' is empty or not a text. Write the question there.")
    return text


def _get_last_user_message(messages: object, where: str) -> object:
    items = messages if isinstance(messages, list) else []
    contents = [item.get("content") for item in items if isinstance(item, dict) and item.get("role") == "user"]
    if not contents:
        raise BadInput(f"{where}: 'messages' must be a list of objects with 'role' and 'content', one by the user.")
    return contents[-1]
