"""Questions from files: JSON lines, plain text, CSV, Parquet, the benchmark folder, and exports of other tools.

Formats: `jsonl:FILE` (or .jsonl.gz) has one object per line:

    {"question": ..., "id"?, "answers"?: [..], "lang"?, "choices"?: [..], "contexts"?: [{"id"?, "title"?, "text"}],
     "meta"?}

`csv:FILE?question=COLUMN&answers=COLUMN` and `parquet:FILE?...` read a table. Other columns of text go into `meta`.

| option | meaning | default |
|---|---|---|
| question, id | columns | question, id |
| answers | column of the gold answer: a JSON list, or separated by `split` | answers |
| split | separator of several gold answers in a cell | none |
| sep | separator of the columns of a CSV file | detected from the first line |

Exports of LangSmith, Langfuse, Phoenix and OpenAI batches also contain recorded answers.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from knowgate.core.files import INVALID_UTF8, open_text, read_jsonl, read_lines
from knowgate.core.registry import split_spec
from knowgate.core.validation import check_regular_file, expand_path, read_json
from knowgate.data.questions import records
from knowgate.errors import BadInput, BadSetting, UnknownName, require_extra
from knowgate.types import Question

BENCHMARK_VARIABLE = "KNOWGATE_BENCH"
BENCHMARK_SUFFIX = ".jsonl.gz"
TABLE_FIELDS = records.FieldMapping(
    ("question", "Question", "query", "input"), ("answers", "answer_gold", "gold", "reference"), ("id",)
)
TABLE_OPTIONS = ("question", "answers", "id", "split")
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
RowIterator = Iterator[tuple[str, dict[str, Any]]]  # the location of each row, for error messages, and the row
MAX_CELL_CHARS = 10_000_000
PARQUET_BATCH = 1_000


def read_jsonl_file(file: str) -> Iterator[Question]:
    """Read a JSONL file of questions."""
    return records.read_question_file(find_file(file))


def read_text_file(file: str) -> Iterator[Question]:
    """Read a plain text file with one question per line; ids are line numbers."""
    path = find_file(file)
    for number, line in read_lines(path):
        if INVALID_UTF8.search(line):
            raise BadInput(f"{path} line {number} is not UTF-8 text. Convert the file, for example with iconv.")
        yield Question(line.strip(), id=str(number))


def read_csv(value: str) -> Iterator[Question]:
    """Read the questions of a CSV file with a header. Example of `value`: 'FILE?question=q'."""
    path, query = parse_file_spec(value)
    options = records.parse_query_options(query, (*TABLE_OPTIONS, "sep"), "csv")
    separator = options.get("sep")
    if separator is not None and len(separator) != 1:
        raise BadSetting(f"the separator sep='{separator[:20]}' must be a single character, such as ';'.")
    rows = read_csv_rows(path, separator)
    return records.convert_records(rows, records.override_fields(TABLE_FIELDS, options))


def read_parquet(value: str) -> Iterator[Question]:
    """Read the questions of a Parquet file. Example of `value`: 'FILE?question=q'."""
    path, query = parse_file_spec(value)
    fields = records.override_fields(TABLE_FIELDS, records.parse_query_options(query, TABLE_OPTIONS, "parquet"))
    return records.convert_records(read_parquet_rows(path), fields)


def read_benchmark(value: str) -> Iterator[Question]:
    """Read the file NAME/SPLIT.jsonl.gz in the folder KNOWGATE_BENCH.

    Raises:
        UnknownName: There is no such benchmark, or it has no such split.
    """
    name, _, split = value.partition("/")
    files = list(find_benchmark_folder().glob(f"*/*{BENCHMARK_SUFFIX}"))
    names = {file.parent.name for file in files}
    if name not in names:
        raise UnknownName("benchmark", name, names)
    splits = {file.name.removesuffix(BENCHMARK_SUFFIX): file for file in files if file.parent.name == name}
    if split not in splits:
        raise UnknownName(f"split of '{name}'", split, splits)
    return records.read_question_file(splits[split])


def find_benchmark_folder() -> Path:
    """Return the folder in the environment variable KNOWGATE_BENCH."""
    value = os.environ.get(BENCHMARK_VARIABLE)
    if not value:
        raise BadSetting(
            f"the folder of the benchmark data (bench:NAME) is not set. Set the environment variable {BENCHMARK_VARIABLE} to "
            "it. To read your own data, use jsonl:FILE"
        )
    path = expand_path(value)
    if not path.is_dir():
        raise BadInput(f"{BENCHMARK_VARIABLE}='{path}' is not a folder. Set the variable to the benchmark folder.")
    return path


def find_file(name: str) -> Path:
    """Return the path of an existing regular file."""
    path = expand_path(name)
    if not path.exists():
        raise BadInput(f"there is no file {str(path)!r}. Check the path.")
    check_regular_file(path)
    return path


def parse_file_spec(value: str) -> tuple[Path, str]:
    """Split 'FILE?OPTIONS' into the path and the text of the options."""
    file, _, query = value.partition("?")
    return find_file(file), query


# --- tables ---------------------------------------------------------------------------------------


def read_parquet_rows(path: Path) -> RowIterator:
    """Yield (location, row) for each row of a Parquet file. The location is for error messages."""
    with require_extra("reading Parquet files", "parquet"):
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(PARQUET_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except (ArrowException, OSError) as error:
        raise BadInput(f"{path} cannot be read as Parquet: {str(error)[:200]}. Check that it is complete.") from None


def read_csv_rows(path: Path, separator: str | None) -> RowIterator:
    """Yield (location, row) for each row of a CSV file. A row maps column names to texts.

    Args:
        path: The file.
        separator: Separates the cells of a line; None to detect it from the header.
    """
    csv.field_size_limit(MAX_CELL_CHARS)
    with open_text(path) as file:
        try:
            reader = csv.DictReader(file, delimiter=separator or _detect_separator(path), strict=True)
            for row in reader:
                where = f"{path} line {reader.line_num}"
                if None in row:  # DictReader puts cells without a column under None
                    raise BadInput(f"{where} has more cells than the header. Check its quotes and the separator `sep`.")
                yield where, {name: text for name, text in row.items() if text is not None}  # None: a missing cell
        except csv.Error as error:
            raise BadInput(
                f"{path} is not a CSV file with a header: {error}. Check the file, or name its separator with `sep`."
            ) from None
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None


def _detect_separator(path: Path) -> str:
    """Return the most frequent separator (comma, semicolon, tab, bar) of the first line."""
    with open_text(path, errors="replace") as file:
        header = file.readline(100_000)
    return max(",;\t|", key=header.count)


# --- exports of other tools -----------------------------------------------------------------------


def read_export_records(path: Path) -> RowIterator:
    """Yield (location, record) for each record of an exported file. The location is for error messages."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from read_parquet_rows(path)
    elif suffix == ".csv":
        yield from read_csv_rows(path, separator=None)
    elif suffix == ".json":
        yield from _read_json_list(path)
    else:
        yield from ((f"{path} line {number}", record) for number, record in read_jsonl(path))


def _read_json_list(path: Path) -> RowIterator:
    """Yield (location, record) for each object of a JSON list. The list may be in a field such as 'data'."""
    content = read_json(path)
    if isinstance(content, dict):
        content = next((content[name] for name in LIST_FIELDS if name in content), content)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise BadInput(f"{path} is not a list of JSON objects. Export the data as JSON Lines or as a JSON list.")
    yield from ((f"{path} entry {number}", record) for number, record in enumerate(content, start=1))


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
    return records.extract_text(body.get("messages") or body.get("input")) if isinstance(body, dict) else ""


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


# --- other fields of a record ---------------------------------------------------------------------

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
