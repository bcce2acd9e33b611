"""Questions from a JSONL file (or .jsonl.gz), one object per line.

{"question": ..., "id"?, "answers"?: [..], "lang"?, "choices"?: [..], "contexts"?: [{"id"?, "title"?, "text"}], "meta"?}
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from knowgate.datasets.parse import read_file
from knowgate.errors import BadInput
from knowgate.types import Question


def read_questions(file: str) -> Iterator[Question]:
    path = Path(file).expanduser()
    if not path.is_file():
        raise BadInput(f"there is no file '{path}'.")
    return read_file(path)
