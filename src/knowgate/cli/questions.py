"""Readers of the questions for a command: from its arguments, from standard input, or from a file."""

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
TEXT_KEYS = ("question", "text", "messages")  # keys that may contain the question in a line of a traffic log


@dataclass
class QuestionStream:
    """Questions from lines of input, read while they are iterated. The id of a question is its line number.

    Attributes:
        questions: The questions.
        skipped: Numbers of empty lines that were skipped, counted from 1; grows while questions are read.
    """

    questions: Iterator[Question]
    skipped: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[Question]:
        return self.questions

    def take_skipped(self, before: int | None = None) -> list[int]:
        """Return the numbers of empty lines that were not returned by an earlier call.

        Args:
            before: Return only empty lines before this line; None for all that were read so far.
        """
        numbers = [number for number in self.skipped if before is None or number < before]
        del self.skipped[: len(numbers)]  # the reader appends to the same list
        return numbers


def read_arguments(questions: list[str] | None) -> QuestionStream:
    """Read questions from the arguments or, if there are none, from standard input, one per line.

    Raises:
        BadInput: There is no question, or standard input is a terminal.
    """
    if questions:
        texts = [_check_argument(question) for question in questions]
        is_single = len(texts) == 1
        return QuestionStream(
            Question(text, "" if is_single else str(number)) for number, text in enumerate(texts, start=1)
        )
    if sys.stdin is None or sys.stdin.isatty():
        raise BadInput("no question given. Write it as an argument, or pipe questions to standard input, one per line.")
    return _read_stream(sys.stdin.buffer, STDIN)


def read_question_file(file: Path) -> QuestionStream:
    """Read questions from a text file, one per line, or from a JSONL file, recognized by its name."""
    if is_jsonl_file(str(file)):
        return QuestionStream(read_messages(file))
    return _read_stream(_open_lines(file), f"'{file}'")


def _open_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file, which is open while they are read."""
    with file.open("rb") as lines:
        yield from lines


def _read_stream(lines: Iterable[bytes], where: str) -> QuestionStream:
    """Make a stream of the questions in lines of text; raise BadInput at once if there are none.

    The first question is read at once, so that empty input is reported before a model is loaded. The other lines are
    read while the stream is iterated.
    """
    skipped: list[int] = []  # grows while lines are read
    questions = _read_questions(lines, where, skipped)
    first = next(questions)
    return QuestionStream(chain([first], questions), skipped)


def _read_questions(lines: Iterable[bytes], where: str, skipped: list[int]) -> Iterator[Question]:
    """Yield a question for each line that is not empty; append the numbers of empty lines to `skipped`.

    Raises:
        BadInput: All lines are empty, or a line is not UTF-8 text.
    """
    is_empty = True
    for number, line in enumerate(lines, start=1):
        text = _decode(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, number, where).strip()
        if text:
            is_empty = False
            yield Question(text, str(number))
        else:
            skipped.append(number)
    if is_empty:
        raise BadInput(f"{where} contains no question. Write one question per line.")


def _decode(line: bytes, number: int, where: str) -> str:
    """Decode a line as UTF-8; raise BadInput that names the line if that is impossible."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise BadInput(
            f"line {number} of {where} is not UTF-8 text. Convert it to UTF-8, for example with iconv."
        ) from None


def _check_argument(text: str) -> str:
    """Return a question from the command line; raise BadInput if it is empty or not valid UTF-8.

    Python represents invalid bytes of the command line as surrogates, which cannot be encoded.
    """
    if not text.strip():
        raise BadInput("the question is empty. Type a question.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(f"the question is not UTF-8 text: {text[:60]!a}. Type it in a UTF-8 terminal.") from None
    return text


# --- traffic logs ---------------------------------------------------------------------------------


def read_messages(file: Path) -> Iterator[Question]:
    """Read the questions of a JSONL file of recorded traffic.

    The question of a line is in `question` or `text`, or is the last message of the user in `messages`.
    """
    for number, record in read_jsonl(file):
        yield Question(_get_text(record, f"{file} line {number}"), str(number))


def _get_text(record: Mapping[str, Any], where: str) -> str:
    """Return the question of one line of a traffic log; raise BadInput if it has none."""
    key = next((key for key in TEXT_KEYS if key in record), None)
    if key is None:
        raise BadInput(f"{where} has none of the keys {', '.join(TEXT_KEYS)}. Add one of them.")
    text = _get_last_user_message(record[key], where) if key == "messages" else record[key]
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{where}: '{key}' is empty or not a text. Write the question there.")
    return text


def _get_last_user_message(messages: object, where: str) -> object:
    """Return the content of the last message whose role is 'user'; raise BadInput if there is none."""
    items = messages if isinstance(messages, list) else []
    contents = [item.get("content") for item in items if isinstance(item, dict) and item.get("role") == "user"]
    if not contents:
        raise BadInput(f"{where}: 'messages' must be a list of objects with 'role' and 'content', one of role 'user'.")
    return contents[-1]
