"""Fields of a data file beside the questions, such as recorded answers, grades and log-probabilities.

Scores and feedback of Langfuse, LangSmith and Phoenix are added under `scores`: `scores.NAME` is the value of the
last score with that name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

from knowgate.core.files import read_jsonl
from knowgate.core.registry import split_spec
from knowgate.core.validation import expand_path
from knowgate.data.questions.exports import LANGFUSE, LANGSMITH, PHOENIX, read_export_records
from knowgate.data.questions.files import TABLE_FIELDS, parse_file_spec
from knowgate.data.questions.records import (
    find_field,
    get_first_field,
    override_fields,
    parse_nested_json,
    parse_question,
)

QUESTION_FIELDS = frozenset({"question", "id", "answers", "lang", "choices", "contexts", "meta"})
MAPPINGS = {"langsmith": LANGSMITH, "langfuse": LANGFUSE, "phoenix": PHOENIX, "parquet": TABLE_FIELDS}
SCORE_LISTS = ("scores", "feedback", "annotations")  # lists of {"name" or "key", "value" or "score", ...}
SCORE_VALUES = ("value", "score", "result.score", "stringValue", "string_value", "label", "result.label")
SCORES = "scores"
ExtraFields = Mapping[str, Any]


def read_extra_fields(spec: str) -> dict[str, ExtraFields]:
    """Read the fields of each record that are not part of the question, by question id.

    Args:
        spec: Data spec of JSON lines, a table, or an export. Other sources have no extra fields.

    Returns:
        The fields by question id; empty for other sources.

    Raises:
        BadInput: The file is missing or invalid.
    """
    kind, value = split_spec(spec)
    if kind == "jsonl":
        return dict(_read_jsonl_fields(value))
    return dict(_read_export_fields(kind, value)) if kind in MAPPINGS else {}


def _read_jsonl_fields(file: str) -> Iterator[tuple[str, ExtraFields]]:
    for number, record in read_jsonl(expand_path(file)):
        question = parse_question(record, f"{file} line {number}", default_id=str(number))
        yield question.id, {key: field for key, field in record.items() if key not in QUESTION_FIELDS}


def _read_export_fields(kind: str, value: str) -> Iterator[tuple[str, ExtraFields]]:
    path, query = parse_file_spec(value)
    mapping = override_fields(MAPPINGS[kind], dict(parse_qsl(query)))
    for number, (_, record) in enumerate(read_export_records(path), start=1):
        record_id = get_first_field(record, mapping.id)
        yield str(number if record_id is None else record_id), {**record, SCORES: read_scores(record)}


def read_scores(record: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the scores, feedback and annotations of an exported record by name.

    Langfuse lists `scores`, Phoenix `annotations`, and LangSmith `feedback` or averages in `feedback_stats`.

    Args:
        record: An exported trace, run or span.

    Returns:
        The value of each score: a number, a boolean or a text.
    """
    stats = parse_nested_json(record.get("feedback_stats"))
    scores = {name: find_field(item, "avg") for name, item in stats.items()} if isinstance(stats, Mapping) else {}
    for field in SCORE_LISTS:
        items = parse_nested_json(record.get(field))
        if isinstance(items, Mapping):  # {name: value} or {name: [values]}
            scores |= {name: item[-1] if isinstance(item, list) and item else item for name, item in items.items()}
        for item in items if isinstance(items, list) else ():
            if isinstance(item, Mapping):
                scores[str(item.get("name") or item.get("key"))] = get_first_field(item, SCORE_VALUES)
    return scores
