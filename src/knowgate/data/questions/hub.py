"""Questions from a Hugging Face data set: hub:NAME?split=test&config=...&question=COLUMN&answers=COLUMN&id=COLUMN.

NAME is a hub name or a local folder that `datasets` can read. Columns may be nested: `answers=answer.aliases`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

from datasets import load_dataset

from knowgate.data.questions.records import parse_question
from knowgate.errors import BadInput, BadSetting
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
    name, _, query = value.partition("?")
    options = {**DEFAULT_OPTIONS, **_options(query)}
    for number, record in enumerate(_rows(name, options), start=1):
        where = f"hub:{name} row {number}"
        yield parse_question(_mapped(record, options), where, default_id=f"{options['split']}-{number}")


def _options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - set(DEFAULT_OPTIONS))
    if unknown:
        raise BadSetting(f"hub: unknown option '{unknown[0]}'. Known: {', '.join(DEFAULT_OPTIONS)}.")
    return options


def _rows(name: str, options: Mapping[str, str]) -> Any:
    try:
        return load_dataset(name, options["config"] or None, split=options["split"])
    except (OSError, ValueError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"cannot load hub:{name} (split {options['split']}): {first}") from error


def _mapped(record: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, Any]:
    answers = _column(record, options["answers"])
    found = {
        "question": _column(record, options["question"]),
        "answers": [answers] if isinstance(answers, str) else list(answers or []),
        "choices": list(_column(record, options["choices"]) or []),
        "lang": record.get("lang"),
    }
    identity = _column(record, options["id"])
    return found if identity is None else {**found, "id": str(identity)}


def _column(record: Mapping[str, Any], path: str) -> Any:
    value: Any = record
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
