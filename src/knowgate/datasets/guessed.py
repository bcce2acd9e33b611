"""What somebody means who names a file of questions, or a data source. Looks at names only."""

from __future__ import annotations

from pathlib import Path

from knowgate.datasets import DATASETS
from knowgate.doors import user_path
from knowgate.errors import BadInput
from knowgate.registry import plugins, split_spec

JSON = (".jsonl", ".json", ".ndjson", ".jsonl.gz")


def data_spec(given: str) -> str:
    """The spec of a file (JSON lines or a table by its ending, else a question per line), or the spec as given."""
    name, _ = split_spec(given)
    if name in DATASETS or name in plugins("knowgate.datasets"):
        return given
    if not user_path(given).is_file():
        kinds = "; ".join(entry.summary for entry in DATASETS.values())
        raise BadInput(f"there is no file of questions '{given}'. Name a file, or a data source: {kinds}.")
    table = Path(given).suffix.lower().removeprefix(".")
    return f"{'jsonl' if is_json_lines(given) else table if table in ('csv', 'parquet') else 'lines'}:{given}"


def is_json_lines(file: str) -> bool:
    """By its ending."""
    return str(Path(file)).lower().endswith(JSON)
