"""Readers of the questions for a command: from its arguments, from standard input, or from a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from knowgate.core.files import read_jsonl
from knowgate.data.questions import is_jsonl_file
from knowgate.errors import BadInput
from knowgate.types import Question


def read_arguments(questions: list[str] | None) -> Iterator[Question]:
    """Read questions from the arguments, or else from the lines of standard input.

    Raises:
        BadInput: There is no question, or standard input is a terminal.
    """
    if questions:
        texts = [_check_argument(question) for question in questions]
        is_single = len(texts) == 1
        return iter([Question(text, "" if is_single else str(number)) for number, text in enumerate(texts, start=1)])
    if sys.stdin is None or sys.stdin.isatty():
        raise BadInput("no question given. Write it as an argument, or pipe questions to standard input, one per line.")
    return _read_lines(sys.stdin.buffer, "standard input")


def read_question_file(file: Path) -> Iterator[Question]:
    """Read questions from a text file, one per line, or from a JSONL file."""
    if is_jsonl_file(str(file)):
        return (
            Question(_get_text(record, f"{file} line {number}"), str(number)) for number, record in read_jsonl(file)
        )
    return _read_lines(_open_lines(file), f"'{file}'")


def _open_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file."""
    with file.open("rb") as lines:
        yield from lines


def _read_lines(lines: Iterable[bytes], where: str) -> Iterator[Question]:
    """Return an iterator over the questions in lines of text.

    The first question is read at once, to report empty input early.

    Args:
        lines: The lines, as bytes.
        where: Name of their source, for error messages.

    Raises:
        BadInput: There is no question, or a line is not UTF-8 text.
    """
    questions = _iterate_questions(lines, where)
    first = next(questions, None)
    if first is None:
        raise BadInput(f"{where} contains no question. Write one question per line.")
    return chain([first], questions)


def _iterate_questions(lines: Iterable[bytes], where: str) -> Iterator[Question]:
    """Yield a question for each non-empty line. The id is the line number."""
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # the first line may have a byte order mark
        except UnicodeDecodeError:
            raise BadInput(
                f"line {number} of {where} is not UTF-8 text. Convert it to UTF-8, for example with iconv."
            ) from None
        if text.strip():
            yield Question(text.strip(), str(number))


def _check_argument(text: str) -> str:
    """Return a question from the command line, after checking its text."""
    if not text.strip():
        raise BadInput("the question is empty. Type a question.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(f"the question is not UTF-8 text: {text[:60]!a}. Type it in a UTF-8 terminal.") from None
    return text


def _get_text(record: Mapping[str, Any], where: str) -> str:
    """Return the question of one line of a traffic log."""
    text = record.get("question") or record.get("text")
    messages = record.get("messages")
    if text is None and isinstance(messages, list):
        contents = [item.get("content") for item in messages if isinstance(item, dict) and item.get("role") == "user"]
        text = contents[-1] if contents else None
    if not isinstance(text, str) or not text.strip():
        raise BadInput(
            f"{where} has no question. Write it as 'question', 'text', or a message of the user in 'messages'."
        )
    return text
