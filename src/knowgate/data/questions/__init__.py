"""Sources of questions by spec: 'jsonl:FILE', 'csv:FILE', 'hub:NAME', ... One file = one kind of source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from knowgate.core.registry import RegistryEntry, find_plugins, load_entry, split_spec
from knowgate.core.text import CHOICE_LETTERS
from knowgate.core.validation import check_encodable, check_integer, expand_path, format_value
from knowgate.errors import BadInput, BadSetting
from knowgate.types import Question

DATASETS = {
    "jsonl": RegistryEntry("knowgate.data.questions.files:read_jsonl_file", "jsonl:FILE, one question per line"),
    "lines": RegistryEntry(
        "knowgate.data.questions.files:read_text_file", "lines:FILE, plain text, one question per line"
    ),
    "csv": RegistryEntry("knowgate.data.questions.files:read_csv", "csv:FILE?question=COLUMN&answers=COLUMN"),
    "parquet": RegistryEntry(
        "knowgate.data.questions.files:read_parquet", "parquet:FILE?question=COLUMN", extra="parquet"
    ),
    "langsmith": RegistryEntry("knowgate.data.questions.exports:read_langsmith", "langsmith:FILE, exported runs"),
    "langfuse": RegistryEntry("knowgate.data.questions.exports:read_langfuse", "langfuse:FILE, exported traces"),
    "phoenix": RegistryEntry("knowgate.data.questions.exports:read_phoenix", "phoenix:FILE, exported spans"),
    "openai-batch": RegistryEntry(
        "knowgate.data.questions.exports:read_openai_batch", "openai-batch:REQUESTS?closed=RESULTS&gold=FILE"
    ),
    "hub": RegistryEntry(
        "knowgate.data.questions.hub:read_hub_dataset", "hub:NAME?split=..., a Hugging Face data set", extra="hub"
    ),
    "bench": RegistryEntry(
        "knowgate.data.questions.files:read_benchmark", "bench:NAME/SPLIT from the folder in KNOWGATE_BENCH"
    ),
}


def load_questions(spec: str, limit: int | None = None) -> list[Question]:
    """The questions a spec names, ids unique, at most `limit` of them."""
    if limit is not None:
        check_integer(limit, "the limit")
    name, value = split_spec(spec)
    if name not in DATASETS and Path(spec).is_file():
        raise BadSetting(f"'{spec}' is a file: write jsonl:{spec}")
    source = load_entry(DATASETS, "data source", name, "knowgate.datasets")
    if not value and name in DATASETS:
        raise BadSetting(f"data source '{name}' needs a value: {DATASETS[name].summary}.")
    questions = list(islice(_unique(source(value), spec), limit))
    if not questions:
        raise BadInput(f'{spec} holds no questions. Write one a line: {{"question": "...", "answers": ["..."]}}')
    return questions


def _unique(questions: Iterator[Question], spec: str) -> Iterator[Question]:
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise BadInput(f"{spec} holds the id {format_value(question.id)} twice; ids must be unique.")
        seen.add(question.id)
        yield question


QuestionSource = str | Sequence[Question]
IN_MEMORY_DATA = "questions"  # what a run says of its data where it was no spec


def resolve_questions(data: QuestionSource, limit: int | None = None) -> list[Question]:
    """The questions of a spec, or those given; a given one without an id is called by its number, counted from 1."""
    if limit is not None:
        check_integer(limit, "the limit")
    if isinstance(data, str):
        return load_questions(data, limit)
    wrong = [one for one in data if not isinstance(one, Question)]
    if wrong:
        raise BadInput(f"{wrong[0]!r} is no Question: to label it takes Question('...', answers=('...',)).")
    questions = [replace(one, id=one.id or str(number)) for number, one in enumerate(data[:limit], start=1)]
    _check(questions)
    return questions


def describe_data(data: QuestionSource) -> str:
    """How a run calls its data."""
    return data if isinstance(data, str) else IN_MEMORY_DATA


def _check(questions: Sequence[Question]) -> None:
    if not questions:
        raise BadInput("there are no questions: the list is empty.")
    seen: set[str] = set()
    for question in questions:
        if not question.text.strip():
            raise BadInput(f"question {format_value(question.id)} is empty.")
        for text in (question.text, question.id, *question.answers, *question.choices):
            check_encodable(text, f"question {format_value(question.id)}")
        if len(question.choices) > len(CHOICE_LETTERS):
            raise BadInput(
                f"question {format_value(question.id)} has more choices than there are letters ({len(CHOICE_LETTERS)})."
            )
        if question.id in seen:
            raise BadInput(f"two questions have the id {format_value(question.id)}; ids must be unique.")
        seen.add(question.id)


JSONL_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz")


def guess_data_spec(given: str) -> str:
    """The spec of a file (JSON lines or a table by its ending, else a question per line), or the spec as given."""
    name, _ = split_spec(given)
    if name in DATASETS or name in find_plugins("knowgate.datasets"):
        return given
    if not expand_path(given).is_file():
        kinds = "; ".join(entry.summary for entry in DATASETS.values())
        raise BadInput(f"there is no file of questions '{given}'. Name a file, or a data source: {kinds}.")
    table = Path(given).suffix.lower().removeprefix(".")
    return f"{'jsonl' if is_jsonl_file(given) else table if table in ('csv', 'parquet') else 'lines'}:{given}"


def is_jsonl_file(file: str) -> bool:
    """By its ending."""
    return str(Path(file)).lower().endswith(JSONL_SUFFIXES)
