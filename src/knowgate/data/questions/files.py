"""Questions from files: JSON lines, plain text, CSV, Parquet, and the benchmark folder.

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
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from knowgate.core.files import INVALID_UTF8, open_text, read_lines
from knowgate.core.validation import check_regular_file, expand_path
from knowgate.data.questions import records
from knowgate.errors import BadInput, BadSetting, UnknownName, require_extra
from knowgate.types import Question

BENCHMARK_VARIABLE = "KNOWGATE_BENCH"
BENCHMARK_SUFFIX = ".jsonl.gz"
TABLE_FIELDS = records.FieldMapping(
    ("question", "Question", "query", "input"), ("answers", "answer_gold", "gold", "reference"), ("id",)
)
TABLE_OPTIONS = ("question", "answers", "id", "split")
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
    if len(options.get("sep", ",")) != 1:
        raise BadSetting(f"the separator sep='{options['sep'][:20]}' must be a single character, such as ';'.")
    return records.convert_records(
        read_csv_rows(path, options.get("sep", "")), records.override_fields(TABLE_FIELDS, options)
    )


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


def read_parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
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


def read_csv_rows(path: Path, separator: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, row) for each row of a CSV file. A row maps column names to texts.

    Args:
        path: The file.
        separator: Separates the cells of a line; "" to detect it from the header.
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
