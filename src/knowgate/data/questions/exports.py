"""Questions with recorded answers from exports of LangSmith, Langfuse, Phoenix and OpenAI batches, and their other fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from knowgate.core.files import read_jsonl
from knowgate.core.registry import split_spec
from knowgate.core.validation import expand_path, read_json
from knowgate.data.questions import records
from knowgate.data.questions.files import TABLE_FIELDS, find_file, parse_file_spec, read_csv_rows, read_parquet_rows
from knowgate.errors import BadInput
from knowgate.types import Question

EXPORT_OPTIONS = ("question", "answers", "answer", "id", "split")
BATCH_OPTIONS = ("closed", "open", "gold")
LIST_FIELDS = ("data", "runs", "traces", "spans")  # fields of a JSON export that may hold its list
# Field names of runs and examples in the SDKs and exports of each tool.
LANGSMITH = records.FieldMapping(
    question=("inputs.question", "inputs.query", "inputs.input", "inputs"),
    answers=("reference_outputs", "reference_example.outputs", "reference", "example.outputs"),
    id=("id", "run_id"),
    answer=("outputs.answer", "outputs.output", "outputs"),
)
LANGFUSE = records.FieldMapping(
    question=("input.question", "input.query", "input"),
    answers=("expectedOutput", "expected_output"),
    id=("id", "traceId"),
    answer=("output",),
)
PHOENIX = records.FieldMapping(
    question=("attributes.input.value", "attributes.llm.input_messages", "input"),
    answers=("reference_output", "expected", "annotations.reference"),
    id=("context.span_id", "span_id", "id"),
    answer=("attributes.output.value", "attributes.llm.output_messages", "output"),
)


MAPPINGS = {"langsmith": LANGSMITH, "langfuse": LANGFUSE, "phoenix": PHOENIX, "parquet": TABLE_FIELDS}


def _read_export(source: str, value: str) -> Iterator[Question]:
    """Read exported runs, traces or spans as questions.

    Args:
        source: Name of the tool: 'langsmith', 'langfuse' or 'phoenix'.
        value: The file, and perhaps options after a '?'.
    """
    path, query = parse_file_spec(value)
    options = records.parse_query_options(query, EXPORT_OPTIONS, source)
    return records.convert_records(read_export_records(path), records.override_fields(MAPPINGS[source], options))


def read_langsmith(value: str) -> Iterator[Question]:
    """Read runs exported from LangSmith."""
    return _read_export("langsmith", value)


def read_langfuse(value: str) -> Iterator[Question]:
    """Read traces exported from Langfuse."""
    return _read_export("langfuse", value)


def read_phoenix(value: str) -> Iterator[Question]:
    """Read spans exported from Phoenix."""
    return _read_export("phoenix", value)


def read_export_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, record) for each record of an exported file. The location is for error messages."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from read_parquet_rows(path)
    elif suffix == ".csv":
        yield from read_csv_rows(path, "")
    elif suffix == ".json":
        yield from _read_json_list(path)
    else:
        yield from ((f"{path} line {number}", record) for number, record in read_jsonl(path))


def _read_json_list(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, record) for each object of a JSON list. The list may be in a field such as 'data'."""
    content = read_json(path)
    if isinstance(content, dict):
        content = next((content[name] for name in LIST_FIELDS if name in content), content)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise BadInput(f"{path} is not a list of JSON objects. Export the data as JSON Lines or as a JSON list.")
    yield from ((f"{path} entry {number}", record) for number, record in enumerate(content, start=1))


# --- OpenAI batches -------------------------------------------------------------------------------


def read_openai_batch(value: str) -> Iterator[Question]:
    """Read the requests of an OpenAI batch as questions. The results are recorded answers.

    Args:
        value: 'REQUESTS?closed=RESULTS&open=RESULTS&gold=FILE': the file of requests, and optionally files with the
            results without passages (closed), the results with passages (open) and the gold answers. The recorded
            answers are stored in the `meta` of each question, under 'closed' and 'open'.

    Raises:
        BadInput: A request has no successful result.
    """
    path, query = parse_file_spec(value)
    options = records.parse_query_options(query, BATCH_OPTIONS, "openai-batch")
    result_files = {name: options[name] for name in ("closed", "open") if name in options}
    results = {name: dict(_read_results(file)) for name, file in result_files.items()}
    golds = dict(_read_golds(options["gold"])) if "gold" in options else {}
    for number, record in read_jsonl(path):
        where = f"{path} line {number}"
        request_id = _get_request_id(record, where)
        missing = [result_files[name] for name, answers in results.items() if request_id not in answers]
        if missing:
            raise BadInput(
                f"{where}: the request '{request_id}' has no successful result in the file {missing[0]}. "
                "Remove the request, or run it again."
            )
        meta = {name: answers[request_id] for name, answers in results.items()}
        text = _get_request_text(record)
        question = {"question": text, "id": request_id, "answers": golds.get(request_id, []), "meta": meta}
        yield records.parse_question(question, where, default_id=request_id)


def _get_request_text(record: Mapping[str, Any]) -> str:
    """Return the question of a request of an OpenAI batch, or ''."""
    body = record.get("body")
    if not isinstance(body, dict):
        return ""
    return records.extract_text(body.get("messages") or body.get("input"))


def _read_results(file: str) -> Iterator[tuple[str, str]]:
    """Yield the id and answer of each successful request."""
    path = find_file(file)
    for number, record in read_jsonl(path):
        response = record.get("response")
        if not isinstance(response, dict) or response.get("status_code") != 200 or record.get("error"):
            continue
        body = response.get("body")
        if isinstance(body, dict):
            text = records.extract_text(body.get("choices") or body.get("output"))
            yield _get_request_id(record, f"{path} line {number}"), text


def _read_golds(file: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield the id of each request with its gold answers, from a JSONL file."""
    path = find_file(file)
    for number, record in read_jsonl(path):
        answers = record.get("answers")
        golds = answers if isinstance(answers, list) else [answers]
        yield _get_request_id(record, f"{path} line {number}"), golds


def _get_request_id(record: dict[str, Any], where: str) -> str:
    """Return the id of a request or result of an OpenAI batch."""
    request_id = record.get("custom_id")
    if not isinstance(request_id, str) or not request_id:
        raise BadInput(
            f"{where} has no 'custom_id', so the file is not part of an OpenAI batch. Check the names of the files."
        )
    return request_id


QUESTION_FIELDS = frozenset({"question", "id", "answers", "lang", "choices", "contexts", "meta"})
SCORE_LISTS = ("scores", "feedback", "annotations")  # lists of {"name" or "key", "value" or "score", ...}
SCORE_VALUES = ("value", "score", "result.score", "stringValue", "string_value", "label", "result.label")
SCORES = "scores"
ExtraFields = Mapping[str, Any]


def read_extra_fields(spec: str) -> dict[str, ExtraFields]:
    """Read the fields outside the question of each record, such as scores and timings.

    Args:
        spec: Data spec of JSON lines, a Parquet table, or an export. Other sources have no extra fields.

    Returns:
        The extra fields of each question, by question id; empty for other sources.

    Raises:
        BadInput: The file is missing or invalid.
    """
    kind, value = split_spec(spec)
    if kind == "jsonl":
        return dict(_read_jsonl_fields(value))
    return dict(_read_export_fields(kind, value)) if kind in MAPPINGS else {}


def _read_jsonl_fields(file: str) -> Iterator[tuple[str, ExtraFields]]:
    """Yield the id and the extra fields of each question of a JSONL file."""
    for number, record in read_jsonl(expand_path(file)):
        question = records.parse_question(record, f"{file} line {number}", default_id=str(number))
        yield question.id, {key: field for key, field in record.items() if key not in QUESTION_FIELDS}


def _read_export_fields(kind: str, value: str) -> Iterator[tuple[str, ExtraFields]]:
    """Yield the id, all fields and the scores of each exported record."""
    path, query = parse_file_spec(value)
    mapping = records.override_fields(MAPPINGS[kind], dict(parse_qsl(query)))
    for number, (_, record) in enumerate(read_export_records(path), start=1):
        record_id = records.get_first_field(record, mapping.id)
        yield str(number if record_id is None else record_id), {**record, SCORES: read_scores(record)}


def read_scores(record: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the scores of an exported record by name. Langfuse, Phoenix and LangSmith each use other fields.

    Args:
        record: An exported trace, run or span.

    Returns:
        The value of each score: a number, a boolean or a text.
    """
    scores: dict[str, Any] = {}
    stats = records.parse_nested_json(record.get("feedback_stats"))
    if isinstance(stats, Mapping):
        scores |= {name: records.find_field(item, "avg") for name, item in stats.items()}
    for field in SCORE_LISTS:
        scores |= _read_score_field(records.parse_nested_json(record.get(field)))
    return scores


def _read_score_field(items: Any) -> dict[str, Any]:
    """Read scores from {name: value}, {name: [values]} or [{"name": ..., "value": ...}, ...]."""
    scores: dict[str, Any] = {}
    if isinstance(items, Mapping):
        for name, value in items.items():
            scores[name] = value[-1] if isinstance(value, list) and value else value  # the last value counts
    elif isinstance(items, list):
        for item in items:
            if isinstance(item, Mapping):
                scores[str(item.get("name") or item.get("key"))] = records.get_first_field(item, SCORE_VALUES)
    return scores
