"""Question sources by spec: 'jsonl:FILE', 'csv:FILE', 'hub:NAME', ... To add one: a reader and a line in the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from knowgate.core.registry import RegistryEntry, find_plugins, load_entry, split_spec
from knowgate.core.text import CHOICE_LETTERS
from knowgate.core.validation import check_encodable, check_integer, check_unique_ids, expand_path, format_value
from knowgate.errors import BadInput, BadSetting
from knowgate.types import Question

QuestionSource = str | Sequence[Question]
PLUGIN_GROUP = "knowgate.datasets"  # entry points of other packages
IN_MEMORY_DATA = "questions"  # name of data that was given as a list
JSONL_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz")
FILES = "knowgate.data.questions.files"
DATASETS = {
    "jsonl": RegistryEntry(f"{FILES}:read_jsonl_file", "jsonl:FILE, one question per line"),
    "lines": RegistryEntry(f"{FILES}:read_text_file", "lines:FILE, plain text, one question per line"),
    "csv": RegistryEntry(f"{FILES}:read_csv", "csv:FILE?question=COLUMN&answers=COLUMN"),
    "parquet": RegistryEntry(f"{FILES}:read_parquet", "parquet:FILE?question=COLUMN", extra="parquet"),
    "langsmith": RegistryEntry(f"{FILES}:read_langsmith", "langsmith:FILE, exported runs"),
    "langfuse": RegistryEntry(f"{FILES}:read_langfuse", "langfuse:FILE, exported traces"),
    "phoenix": RegistryEntry(f"{FILES}:read_phoenix", "phoenix:FILE, exported spans"),
    "openai-batch": RegistryEntry(f"{FILES}:read_openai_batch", "openai-batch:REQUESTS?closed=RESULTS&gold=FILE"),
    "hub": RegistryEntry("knowgate.data.questions.hub:read_hub_dataset",
        "hub:NAME?split=..., a Hugging Face data set", extra="hub"),
    "bench": RegistryEntry(f"{FILES}:read_benchmark", "bench:NAME/SPLIT from the folder in KNOWGATE_BENCH"),
}  # fmt: skip


def load_questions(spec: str, limit: int | None = None) -> list[Question]:
    """Load the questions of a data spec.

    Args:
        spec: Data spec, such as 'jsonl:questions.jsonl' or 'hub:NAME?split=test'.
        limit: Load at most this many questions.

    Returns:
        Questions with unique ids.

    Raises:
        BadSetting: The spec is invalid.
        BadInput: The data is invalid or empty.

    Example:
        >>> questions = load_questions("jsonl:questions.jsonl", limit=100)  # doctest: +SKIP
    """
    if limit is not None:
        check_integer(limit, "the limit")
    name, value = split_spec(spec)
    if name not in DATASETS and Path(spec).is_file():
        raise BadSetting(f"'{spec}' is a file name without its format. Write jsonl:{spec}")
    read = load_entry(DATASETS, "data source", name, PLUGIN_GROUP)
    if not value and name in DATASETS:
        raise BadSetting(f"the data source '{name}' needs a value after the colon: {DATASETS[name].summary}.")
    questions = list(islice(check_unique_ids(read(value), "question", spec), limit))
    if not questions:
        raise BadInput(f'{spec} holds no questions. Write one per line: {{"question": "...", "answers": ["..."]}}')
    return questions


def resolve_questions(data: QuestionSource, limit: int | None = None) -> list[Question]:
    """Load the questions of a data spec, or check a list of `Question` objects. Missing ids become numbers from 1."""
    if isinstance(data, str):
        return load_questions(data, limit)
    if limit is not None:
        check_integer(limit, "the limit")
    invalid = [item for item in data if not isinstance(item, Question)]
    if invalid:
        raise BadInput(
            f"the list of questions contains {invalid[0]!r}, which is not a Question. Write Question('...', "
            "answers=('...',))."
        )
    questions = [replace(item, id=item.id or str(number)) for number, item in enumerate(data[:limit], start=1)]
    _check_questions(questions)
    return questions


def _check_questions(questions: Sequence[Question]) -> None:
    """Raise BadInput for empty questions, invalid texts and duplicate ids."""
    if not questions:
        raise BadInput("the list of questions is empty. Give at least one question.")
    for question in check_unique_ids(questions, "question", "the list"):
        name = f"question {format_value(question.id)}"
        if not question.text.strip():
            raise BadInput(f"{name} is empty. Write its text, or remove it.")
        for text in (question.text, question.id, *question.answers, *question.choices):
            check_encodable(text, name)
        if len(question.choices) > len(CHOICE_LETTERS):
            raise BadInput(
                f"{name} has {len(question.choices)} choices. Use at most {len(CHOICE_LETTERS)}, one per letter."
            )


def describe_data(data: QuestionSource) -> str:
    """Return the name under which a run records its data: the data spec, or 'questions' for a list."""
    return data if isinstance(data, str) else IN_MEMORY_DATA


def guess_data_spec(name: str) -> str:
    """Convert a file name to a data spec. Example: 'a.csv' becomes 'csv:a.csv'."""
    kind, _ = split_spec(name)
    if kind in DATASETS or kind in find_plugins(PLUGIN_GROUP):
        return name
    if not expand_path(name).is_file():
        sources = "; ".join(entry.summary for entry in DATASETS.values())
        raise BadInput(f"there is no file '{name}' with questions. Give a file, or a data source: {sources}.")
    if is_jsonl_file(name):
        return f"jsonl:{name}"
    suffix = Path(name).suffix.lower().removeprefix(".")
    return f"{suffix if suffix in ('csv', 'parquet') else 'lines'}:{name}"


def is_jsonl_file(file: str) -> bool:
    """Return whether a file holds JSON lines, by its suffix."""
    return str(Path(file)).lower().endswith(JSONL_SUFFIXES)
