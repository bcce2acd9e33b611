"""The recorded LLMs of the policy benchmark: their rows, grades and folds."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knowgate.core.text import grade_contains
from knowgate.data.splits import fingerprint_text_loosely
from knowgate.types import Question


@dataclass(frozen=True)
class RecordedSet:
    """A data set with an LLM's recorded answers.

    Attributes:
        data: Name of the folder of the benchmark data.
        llm: Name of the LLM in tables.
        grades: Key of the recorded grades in `meta`; empty to grade by `contains`.
        splits: Splits that the data set has.
    """

    data: str
    llm: str
    grades: str
    splits: tuple[str, ...] = ("train", "test")


RECORDED_SETS = {
    "llama3_8b": RecordedSet("gate_llama3_8b", "Llama-3.1-8B", "acc_contains"),
    "gpt4_nq": RecordedSet("gate_gpt4_nq", "GPT-4", "correct"),
    "chatgpt_nq": RecordedSet("gate_chatgpt_nq", "ChatGPT 3.5", "correct"),
    "davinci3_nq": RecordedSet("gate_davinci3_nq", "text-davinci-003", "correct"),
    "gpt3_realtimeqa": RecordedSet("gate_gpt3_realtimeqa", "GPT-3", ""),
    "llama4_realtimeqa": RecordedSet("gate_llama4_realtimeqa_2026", "Llama-4-Maverick", "correct", ("test",)),
}


@dataclass(frozen=True)
class RecordedRow:
    """One question with both recorded answers and their grades."""

    id: str
    split: str
    question: str
    closed: str
    open: str
    closed_book_right: bool
    open_book_right: bool


def read_recorded(bench: Path, name: str) -> list[RecordedRow]:
    """Read all rows of a recorded set, train rows first."""
    recorded = RECORDED_SETS[name]
    rows = []
    for split in recorded.splits:
        with gzip.open(bench / recorded.data / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows += [_parse(json.loads(line), split, recorded.grades) for line in lines]
    return rows


def _parse(row: dict[str, Any], split: str, grades: str) -> RecordedRow:
    meta = row["meta"]
    answers = [str(meta[key] or "") for key in ("pred_no_retrieval", "pred_one_retrieval")]
    if grades:
        right = [bool(meta[grades][key]) for key in ("nor", "oner")]
    else:
        question = Question(row["question"], answers=tuple(row["answers"]))
        right = [grade_contains(answer, question).correct for answer in answers]
    return RecordedRow(row["id"], split, row["question"], answers[0], answers[1], right[0], right[1])


def assign_question_folds(questions: Sequence[str], n_folds: int) -> list[int]:
    """Assign each question to a fold by a hash of its words, so that equal questions share a fold everywhere."""
    return [
        int(hashlib.sha256(fingerprint_text_loosely(question).encode()).hexdigest()[:8], 16) % n_folds
        for question in questions
    ]
