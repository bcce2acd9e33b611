"""Tables: `csv:FILE?question=COLUMN&answers=COLUMN`, `parquet:FILE?...`. Every other column of text is in the meta,
under its own name: `import-answers --closed COLUMN --open COLUMN`.

| option | meaning | default |
|---|---|---|
| question, id | columns | question, id |
| answers | column of the right answer; a JSON list, or parted by `split` | answers |
| split | what parts several right answers in a cell | nothing |
| sep | what parts the columns of a CSV file | , or what its first line shows |
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from knowgate.datasets.fields import Columns, questions_of, read_options, with_options
from knowgate.doors import check_regular, user_path
from knowgate.errors import BadInput, BadSetting, MissingExtra
from knowgate.files import open_text
from knowgate.types import Question

COLUMNS = Columns(("question", "Question", "query", "input"), ("answers", "answer_gold", "gold", "reference"), ("id",))
OPTIONS = ("question", "answers", "id", "split")
LONGEST_CELL = 10_000_000  # characters


def read_csv(value: str) -> Iterator[Question]:
    """A CSV file with a header."""
    path, query = named_file(value)
    options = read_options(query, (*OPTIONS, "sep"), "csv")
    if len(options.get("sep", ",")) != 1:
        raise BadSetting(f"sep is '{options['sep'][:20]}'; it must be one character.")
    return questions_of(csv_rows(path, options.get("sep", "")), with_options(COLUMNS, options))


def read_parquet(value: str) -> Iterator[Question]:
    """A Parquet file (extra `parquet`)."""
    path, query = named_file(value)
    columns = with_options(COLUMNS, read_options(query, OPTIONS, "parquet"))
    return questions_of(parquet_rows(path), columns)


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
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


def csv_rows(path: Path, separator: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with their place, by the names of the first line."""
    csv.field_size_limit(LONGEST_CELL)
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


def named_file(value: str) -> tuple[Path, str]:
    """The file before the question mark, which is there, and the options after it."""
    file, _, query = value.partition("?")
    path = user_path(file)
    if not path.exists():
        raise BadInput(f"there is no file {str(path)!r}. Check the path.")
    check_regular(path)
    return path, query
