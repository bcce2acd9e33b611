"""What tools that watch LLMs export: LangSmith, Langfuse, Phoenix. JSON lines, a JSON list, CSV or Parquet.

    langsmith:runs.jsonl?question=inputs.question&answers=reference_outputs.answer

The question and the recorded answer are looked for where each tool puts them, the answer under `answer` of the meta:
`import-answers --data langsmith:runs.jsonl --closed answer`. Options `question`, `answers`, `answer`, `id` and `split`
name other places; all other texts are in the meta, those inside others as `outputs.text`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from knowgate.datasets.fields import Columns, questions_of, read_options, with_options
from knowgate.datasets.tables import csv_rows, named_file, parquet_rows
from knowgate.doors import read_json
from knowgate.errors import BadInput
from knowgate.files import read_jsonl
from knowgate.types import Question

OPTIONS = ("question", "answers", "answer", "id", "split")
# runs and examples as their SDKs and exports name them
LANGSMITH = Columns(
    question=("inputs.question", "inputs.query", "inputs.input", "inputs"),
    answers=("reference_outputs", "reference_example.outputs", "reference", "example.outputs"),
    id=("id", "run_id"),
    answer=("outputs.answer", "outputs.output", "outputs"),
)
LANGFUSE = Columns(
    question=("input.question", "input.query", "input"),
    answers=("expectedOutput", "expected_output"),
    id=("id", "traceId"),
    answer=("output",),
)
PHOENIX = Columns(
    question=("attributes.input.value", "attributes.llm.input_messages", "input"),
    answers=("reference_output", "expected", "annotations.reference"),
    id=("context.span_id", "span_id", "id"),
    answer=("attributes.output.value", "attributes.llm.output_messages", "output"),
)


def read_langsmith(value: str) -> Iterator[Question]:
    return _read(value, LANGSMITH, "langsmith")


def read_langfuse(value: str) -> Iterator[Question]:
    return _read(value, LANGFUSE, "langfuse")


def read_phoenix(value: str) -> Iterator[Question]:
    return _read(value, PHOENIX, "phoenix")


def _read(value: str, columns: Columns, what: str) -> Iterator[Question]:
    path, query = named_file(value)
    return questions_of(records(path), with_options(columns, read_options(query, OPTIONS, what)))


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a file, each with its place."""
    kind = path.suffix.lower()
    if kind == ".parquet":
        yield from parquet_rows(path)
    elif kind == ".csv":
        yield from csv_rows(path, "")
    elif kind == ".json":
        yield from _listed(path)
    else:
        yield from ((f"{path} line {number}", record) for number, record in read_jsonl(path))


def _listed(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A list, or an object that holds one under `data`, `runs` or `traces`."""
    kept = read_json(path)
    if isinstance(kept, dict):
        kept = next((kept[name] for name in ("data", "runs", "traces", "spans") if name in kept), kept)
    if not isinstance(kept, list) or not all(isinstance(one, dict) for one in kept):
        raise BadInput(f"{path} holds no list of objects. Export it as JSON lines, or as a list.")
    yield from ((f"{path} entry {number}", record) for number, record in enumerate(kept, start=1))
