"""Sources of questions by spec: 'jsonl:FILE', 'csv:FILE', 'hub:NAME', ... One file = one kind of source."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from knowgate.doors import check_whole, shown
from knowgate.errors import BadInput, BadSetting
from knowgate.lazy import hand_on
from knowgate.registry import Entry, resolve, split_spec
from knowgate.types import Question

if TYPE_CHECKING:
    from knowgate.datasets.beside import texts_beside
    from knowgate.datasets.given import Data, data_name, gather_questions
    from knowgate.datasets.guessed import data_spec, is_json_lines
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "DATASETS",
    "Data",
    "data_name",
    "data_spec",
    "gather_questions",
    "is_json_lines",
    "load_questions",
    "texts_beside",
]

DATASETS = {
    "jsonl": Entry("knowgate.datasets.jsonl:read_questions", "jsonl:FILE, one question per line"),
    "lines": Entry("knowgate.datasets.lines:read_questions", "lines:FILE, plain text, one question per line"),
    "csv": Entry("knowgate.datasets.tables:read_csv", "csv:FILE?question=COLUMN&answers=COLUMN"),
    "parquet": Entry("knowgate.datasets.tables:read_parquet", "parquet:FILE?question=COLUMN", extra="parquet"),
    "langsmith": Entry("knowgate.datasets.exports:read_langsmith", "langsmith:FILE, exported runs"),
    "langfuse": Entry("knowgate.datasets.exports:read_langfuse", "langfuse:FILE, exported traces"),
    "phoenix": Entry("knowgate.datasets.exports:read_phoenix", "phoenix:FILE, exported spans"),
    "openai-batch": Entry("knowgate.datasets.batches:read_batch", "openai-batch:REQUESTS?closed=RESULTS&gold=FILE"),
    "hub": Entry("knowgate.datasets.hub:read_questions", "hub:NAME?split=..., a Hugging Face data set", extra="hub"),
    "bench": Entry("knowgate.datasets.bench:read_questions", "bench:NAME/SPLIT from the folder in KNOWGATE_BENCH"),
}


def load_questions(spec: str, limit: int | None = None) -> list[Question]:
    """The questions a spec names, ids unique, at most `limit` of them."""
    if limit is not None:
        check_whole(limit, "the limit")
    name, value = split_spec(spec)
    if name not in DATASETS and Path(spec).is_file():
        raise BadSetting(f"'{spec}' is a file: write jsonl:{spec}")
    source = resolve(DATASETS, "data source", name, "knowgate.datasets")
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
            raise BadInput(f"{spec} holds the id {shown(question.id)} twice; ids must be unique.")
        seen.add(question.id)
        yield question
