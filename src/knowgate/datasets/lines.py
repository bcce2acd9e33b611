"""Questions from a plain text file, one per line; their ids are the numbers of the lines. There are no gold answers."""

from __future__ import annotations

from collections.abc import Iterator

from knowgate.doors import user_path
from knowgate.errors import BadInput
from knowgate.files import NOT_UTF8, read_lines
from knowgate.types import Question


def read_questions(file: str) -> Iterator[Question]:
    path = user_path(file)
    if not path.exists():
        raise BadInput(f"there is no file {str(path)!r}.")
    for number, line in read_lines(path):
        if NOT_UTF8.search(line):
            raise BadInput(f"{path} line {number} is not UTF-8 text: convert it, as with iconv.")
        yield Question(line.strip(), id=str(number))
