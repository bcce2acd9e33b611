"""OpenAI's batches: `openai-batch:REQUESTS?closed=RESULTS&open=RESULTS&gold=FILE`.

The requests hold the questions, the results what the LLM said: `import-answers --closed closed --open open`. Gold
answers come from a JSONL file of {"custom_id": ..., "answers": [...]}. What failed has no answer: it is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from knowgate.core.files import read_jsonl
from knowgate.core.validation import read_json
from knowgate.data.questions.files import parse_file_spec, read_csv_rows, read_parquet_rows
from knowgate.data.questions.records import (
    FieldMapping,
    convert_records,
    extract_text,
    override_fields,
    parse_query_options,
    parse_question,
)
from knowgate.errors import BadInput
from knowgate.types import Question

BATCH_OPTIONS = ("closed", "open", "gold")
ID_FIELD = "custom_id"


def read_openai_batch(value: str) -> Iterator[Question]:
    """The questions of a batch with the answers that came back."""
    path, query = parse_file_spec(value)
    options = parse_query_options(query, BATCH_OPTIONS, "openai-batch")
    replies = {name: dict(_replies(options[name])) for name in ("closed", "open") if name in options}
    golds = dict(_golds(options["gold"])) if "gold" in options else {}
    for number, record in read_jsonl(path):
        where, own = f"{path} line {number}", _id(record, f"{path} line {number}")
        body = record.get("body")
        asked = extract_text(body.get("messages") or body.get("input")) if isinstance(body, dict) else ""
        missing = [name for name, found in replies.items() if own not in found]
        if missing:
            raise BadInput(
                f"{where}: '{own}' has no answer in {options[missing[0]]}. Take it out of the requests, or run it."
            )
        meta = {name: found[own] for name, found in replies.items()}
        made = {"question": asked, "id": own, "answers": golds.get(own, []), "meta": meta}
        yield parse_question(made, where, default_id=own)


def _replies(file: str) -> Iterator[tuple[str, str]]:
    """What was answered, by the request's id; what failed is left out."""
    path, _ = parse_file_spec(file)
    for number, record in read_jsonl(path):
        reply = record.get("response")
        body = reply.get("body") if isinstance(reply, dict) and reply.get("status_code") == 200 else None
        if isinstance(body, dict) and not record.get("error"):
            yield _id(record, f"{path} line {number}"), extract_text(body.get("choices") or body.get("output"))


def _golds(file: str) -> Iterator[tuple[str, list[Any]]]:
    path, _ = parse_file_spec(file)
    for number, record in read_jsonl(path):
        answers = record.get("answers")
        yield _id(record, f"{path} line {number}"), answers if isinstance(answers, list) else [answers]


def _id(record: dict[str, Any], where: str) -> str:
    own = record.get(ID_FIELD)
    if not isinstance(own, str) or not own:
        raise BadInput(f"{where} has no '{ID_FIELD}': it is no line of a batch. Check which file is which.")
    return own


EXPORT_OPTIONS = ("question", "answers", "answer", "id", "split")
# runs and examples as their SDKs and exports name them
LANGSMITH = FieldMapping(
    question=("inputs.question", "inputs.query", "inputs.input", "inputs"),
    answers=("reference_outputs", "reference_example.outputs", "reference", "example.outputs"),
    id=("id", "run_id"),
    answer=("outputs.answer", "outputs.output", "outputs"),
)
LANGFUSE = FieldMapping(
    question=("input.question", "input.query", "input"),
    answers=("expectedOutput", "expected_output"),
    id=("id", "traceId"),
    answer=("output",),
)
PHOENIX = FieldMapping(
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


def _read(value: str, columns: FieldMapping, what: str) -> Iterator[Question]:
    path, query = parse_file_spec(value)
    return convert_records(
        read_export_records(path), override_fields(columns, parse_query_options(query, EXPORT_OPTIONS, what))
    )


def read_export_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a file, each with its place."""
    kind = path.suffix.lower()
    if kind == ".parquet":
        yield from read_parquet_rows(path)
    elif kind == ".csv":
        yield from read_csv_rows(path, "")
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
