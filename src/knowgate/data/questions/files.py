"""Questions of the benchmark folder named by KNOWGATE_BENCH: `NAME/SPLIT.jsonl.gz` in the format of `jsonl`."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from knowgate.core.files import INVALID_UTF8, open_text, read_lines
from knowgate.core.validation import check_regular_file, expand_path
from knowgate.data.questions.records import (
    FieldMapping,
    convert_records,
    override_fields,
    parse_query_options,
    read_question_file,
)
from knowgate.errors import BadInput, BadSetting, MissingExtra, UnknownName
from knowgate.types import Question

BENCHMARK_VARIABLE = "KNOWGATE_BENCH"


def find_benchmark_folder() -> Path:
    chosen = os.environ.get(BENCHMARK_VARIABLE)
    if not chosen:
        raise BadSetting(
            f"bench: data needs the environment variable {BENCHMARK_VARIABLE}. Set it to the benchmark folder, or give data of "
            "your own: --data jsonl:FILE"
        )
    path = expand_path(chosen)
    if not path.is_dir():
        raise BadInput(
            f"{BENCHMARK_VARIABLE} names '{path}', which is not a folder. Set it to the folder with the benchmarks."
        )
    return path


def read_benchmark(value: str) -> Iterator[Question]:
    name, _, split = value.partition("/")
    root = find_benchmark_folder()
    files = {path.parent.name: path.parent for path in root.glob("*/*.jsonl.gz")}
    if name not in files:
        raise UnknownName("benchmark", name, files)
    splits = {path.name.removesuffix(".jsonl.gz"): path for path in files[name].glob("*.jsonl.gz")}
    if split not in splits:
        raise UnknownName(f"split of '{name}'", split, splits)
    return read_question_file(splits[split])


def read_jsonl_file(file: str) -> Iterator[Question]:
    path = expand_path(file)
    if not path.exists():
        raise BadInput(f"there is no file {str(path)!r}. Check the path.")
    check_regular_file(path)
    return read_question_file(path)


def read_text_file(file: str) -> Iterator[Question]:
    path = expand_path(file)
    if not path.exists():
        raise BadInput(f"there is no file {str(path)!r}.")
    for number, line in read_lines(path):
        if INVALID_UTF8.search(line):
            raise BadInput(f"{path} line {number} is not UTF-8 text: convert it, as with iconv.")
        yield Question(line.strip(), id=str(number))


TABLE_FIELDS = FieldMapping(
    ("question", "Question", "query", "input"), ("answers", "answer_gold", "gold", "reference"), ("id",)
)
TABLE_OPTIONS = ("question", "answers", "id", "split")
MAX_CELL_CHARS = 10_000_000  # characters


def read_csv(value: str) -> Iterator[Question]:
    """A CSV file with a header."""
    path, query = parse_file_spec(value)
    options = parse_query_options(query, (*TABLE_OPTIONS, "sep"), "csv")
    if len(options.get("sep", ",")) != 1:
        raise BadSetting(f"sep is '{options['sep'][:20]}'; it must be one character.")
    return convert_records(read_csv_rows(path, options.get("sep", "")), override_fields(TABLE_FIELDS, options))


def read_parquet(value: str) -> Iterator[Question]:
    """A Parquet file (extra `parquet`)."""
    path, query = parse_file_spec(value)
    columns = override_fields(TABLE_FIELDS, parse_query_options(query, TABLE_OPTIONS, "parquet"))
    return convert_records(read_parquet_rows(path), columns)


def read_parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with their place."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise MissingExtra("reading Parquet files", "parquet") from None
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(1000):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except (ArrowException, OSError) as error:
        raise BadInput(f"{path} cannot be read as Parquet: {str(error)[:200]}. Check that it is whole.") from None


def read_csv_rows(path: Path, separator: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with their place, by the names of the first line."""
    csv.field_size_limit(MAX_CELL_CHARS)
    with open_text(path) as file:
        try:
            reader = csv.DictReader(file, delimiter=separator or _separator(path), strict=True)
            for row in reader:
                where = f"{path} line {reader.line_num}"
                if None in row:
                    raise BadInput(f"{where} has more cells than the first line has names. Check its quotes and sep.")
                yield where, {name: text for name, text in row.items() if text is not None}
        except csv.Error as error:
            raise BadInput(
                f"{path} is no CSV file with a first line of names: {error}. Check it, or give sep=."
            ) from None
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}: byte {error.start} is no UTF-8. Save the file as UTF-8.") from None


def _separator(path: Path) -> str:
    """The one of the usual ones that the first line has most of."""
    with open_text(path, errors="replace") as file:
        first = file.readline(100_000)
    return max(",;\t|", key=first.count)


def parse_file_spec(value: str) -> tuple[Path, str]:
    """The file before the question mark, which is there, and the options after it."""
    file, _, query = value.partition("?")
    path = expand_path(file)
    if not path.exists():
        raise BadInput(f"there is no file {str(path)!r}. Check the path.")
    check_regular_file(path)
    return path, query
