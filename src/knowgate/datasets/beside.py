"""What a line of a JSONL file says beside its question: texts under keys that are none of the format's own.

Only for answers that were recorded elsewhere, whose lines are often flat. A question knows nothing of this.
"""

from __future__ import annotations

from collections.abc import Mapping

from knowgate.datasets.parse import parse_question
from knowgate.doors import user_path
from knowgate.files import read_jsonl
from knowgate.registry import split_spec

OWN = frozenset({"question", "id", "answers", "lang", "choices", "contexts", "meta"})


def texts_beside(spec: str) -> dict[str, Mapping[str, str]]:
    """The texts at the top of each line, by the question's id; nothing for sources that are no JSONL file."""
    kind, file = split_spec(spec)
    if kind != "jsonl":
        return {}
    found: dict[str, Mapping[str, str]] = {}
    for number, record in read_jsonl(user_path(file)):
        own = parse_question(record, f"{file} line {number}", default_id=str(number)).id
        found[own] = {key: text for key, text in record.items() if key not in OWN and isinstance(text, str)}
    return found
