"""Questions from a JSONL file (or .jsonl.gz), one object per line.

{"question": ..., "id"?, "answers"?: [..], "lang"?, "choices"?: [..], "contexts"?: [{"id"?, "title"?, "text"}], "meta"?}
"""

from __future__ import annotations

from collections.abc import Iterator

from knowgate.datasets.parse import read_file
from knowgate.doors import check_regular, user_path
from knowgate.errors import BadInput
from knowgate.types import Question


def read_questions(file: str) -> Iterator[Question]:
    path = user_path(file)
    if not path.exists():
        raise BadInput(f"there is no file {str(path)!r}. Check the path.")
    check_regular(path)
    return read_file(path)
