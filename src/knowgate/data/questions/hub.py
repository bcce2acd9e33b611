"""Questions from a Hugging Face data set: hub:NAME?split=test&config=...&question=COLUMN&answers=COLUMN&id=COLUMN.

NAME is a hub name or a local folder that `datasets` can read. Columns may be nested: `answers=answer.aliases`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from datasets import load_dataset

from knowgate.data.questions.records import find_field, parse_query_options, parse_question
from knowgate.errors import BadInput, get_cause
from knowgate.types import Question

DEFAULT_OPTIONS = {
    "split": "test",
    "config": "",
    "question": "question",
    "answers": "answers",
    "id": "id",
    "choices": "choices",
}


def read_hub_dataset(value: str) -> Iterator[Question]:
    """Read the questions of a Hugging Face data set. Example of `value`: 'NAME?split=test'."""
    name, _, query = value.partition("?")
    options = {**DEFAULT_OPTIONS, **parse_query_options(query, tuple(DEFAULT_OPTIONS), "hub")}
    for number, row in enumerate(_load_rows(name, options), start=1):
        default_id = f"{options['split']}-{number}"
        yield parse_question(_map_row(row, options), f"hub:{name} row {number}", default_id=default_id)


def _load_rows(name: str, options: Mapping[str, str]) -> Any:
    """Load the rows of a Hugging Face data set."""
    try:
        return load_dataset(name, options["config"] or None, split=options["split"])
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"cannot load the data set hub:{name} (split {options['split']}): {get_cause(error)}. Check the name and "
            "the options `config` and `split`."
        ) from error


def _map_row(row: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, Any]:
    """Map the columns of a row to the fields of a question."""
    answers = find_field(row, options["answers"])
    row_id = find_field(row, options["id"])
    return {
        "question": find_field(row, options["question"]),
        "answers": [answers] if isinstance(answers, str) else list(answers or []),
        "choices": list(find_field(row, options["choices"]) or []),
        "lang": row.get("lang"),
        "id": None if row_id is None else str(row_id),
    }
