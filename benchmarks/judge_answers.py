"""What is on record about the answers of an 8B LLM behind an API, and what judges predicted of them: no text of either.

`answers.jsonl.gz` has a row for each question of `bench:gate_llama3_8b`: which of its recorded answers (from memory,
with one retrieval, with IRCoT) are right by the data set's own `acc_contains`, whether the first two are the same
answer, and whether only the second abstains. `judge/NAME.jsonl` has what a judge predicted: "known" (the answer from
memory is right), "found" (the one with documents would be), both before retrieval; "closed" and "open", the same after
it. "dev" rows are rows of the train split that the judge did not learn from: thresholds are chosen there, and test rows
only tell what they gave.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.core.files import read_jsonl
from knowgate.errors import BadInput

Floats, Bools = NDArray[np.float64], NDArray[np.bool_]
HOME = Path(__file__).parent / "runs" / "llama3.1-8b"
DATA, ANSWERS, JUDGES = "bench:gate_llama3_8b", "answers.jsonl.gz", "judge"
COLUMNS = ("known", "found", "closed", "open")
KEYS = {"closed": "nor", "open": "oner", "several": "ircot"}


@dataclass(frozen=True)
class Answers:
    """Rows of one split. same: both answers are the same; rules: the open one abstains and the one from memory not."""

    ids: list[str]
    sets: list[str]
    closed: Bools
    open: Bools
    several: Bools
    same: Bools
    rules: Bools

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, places: Sequence[int] | NDArray[Any]) -> Answers:
        chosen = np.asarray(places, dtype=np.int64)
        names = [[column[place] for place in chosen] for column in (self.ids, self.sets)]
        arrays = [getattr(self, name)[chosen] for name in ("closed", "open", "several", "same", "rules")]
        return Answers(names[0], names[1], *arrays)


def record(out: Path) -> None:
    """Write `answers.jsonl.gz` from the data set."""
    from knowgate.data.questions import load_questions

    lines = [
        json.dumps(_row(question, split)) + "\n"
        for split in ("train", "test")
        for question in load_questions(f"{DATA}/{split}")
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:  # the same bytes every time
        packed.write("".join(lines).encode())


def _row(question: Any, split: str) -> dict[str, Any]:
    from knowgate.data.signals.samples import canonical_answer
    from knowgate.gates.arbiters.abstention import RULES_ARBITER

    closed, opened = (question.meta[f"pred_{key}_retrieval"] for key in ("no", "one"))
    return {
        "id": question.id,
        "split": split,
        "set": question.meta["dataset"],
        **{name: bool(question.meta["acc_contains"][key]) for name, key in KEYS.items()},
        "same": canonical_answer(closed, question) == canonical_answer(opened, question),
        "rules": RULES_ARBITER.abstains(opened) and not RULES_ARBITER.abstains(closed),
    }


def read_answers(home: Path, split: str) -> Answers:
    file = home / ANSWERS
    return _read_answers(file, split, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read_answers(file: Path, split: str, changed: int) -> Answers:
    """Read once for all judges; changed: when the file was, so that another one is read anew."""
    rows = [row for _, row in read_jsonl(file) if row["split"] == split]
    columns = [np.array([row[name] for row in rows], dtype=bool) for name in (*KEYS, "same", "rules")]
    return Answers([row["id"] for row in rows], [row["set"] for row in rows], *columns)


@dataclass(frozen=True)
class Predicted:
    """What a judge said of the rows of a split that it has: P(right) by column."""

    answers: Answers
    columns: Mapping[str, Floats]

    @property
    def can_choose(self) -> bool:
        return {"closed", "open"} <= set(self.columns)

    @property
    def from_memory(self) -> Bools:
        """Where the arbiter gives the answer from memory."""
        return ~self.answers.same & (self.columns["closed"] > self.columns["open"])

    @property
    def given(self) -> Bools:
        """Whether what the arbiter gives after retrieval is right."""
        return np.where(self.from_memory, self.answers.closed, self.answers.open)


@dataclass(frozen=True)
class Judge:
    """Predictions of one name, on dev and test rows, and what was noted about its training."""

    name: str
    dev: Predicted
    test: Predicted
    about: Mapping[str, Any]


def judge_names(home: Path) -> list[str]:
    return sorted(file.stem for file in (home / JUDGES).glob("*.jsonl"))


def read_judge(home: Path, name: str) -> Judge:
    file = home / JUDGES / f"{name}.jsonl"
    rows = [row for _, row in read_jsonl(file)]
    about = file.with_suffix(".json")
    noted = json.loads(about.read_text(encoding="utf-8")) if about.is_file() else {}
    return Judge(name, *(_predicted(home, rows, split, name) for split in ("dev", "test")), noted)


def _predicted(home: Path, rows: Sequence[Mapping[str, Any]], split: str, name: str) -> Predicted:
    answers = read_answers(home, "test" if split == "test" else "train")
    said = {row["id"]: row for row in rows if row["split"] == split}
    unknown = sorted(set(said) - set(answers.ids))
    if unknown:
        raise BadInput(f"'{name}' has predictions for {len(unknown)} {split} rows nobody knows, first '{unknown[0]}'.")
    kept = answers.at([place for place, key in enumerate(answers.ids) if key in said])
    if split == "test" and len(kept) < len(answers):
        raise BadInput(f"'{name}' has predictions for {len(kept)} of {len(answers)} test rows; all are wanted.")
    if not len(kept):
        raise BadInput(f"'{name}' has no {split} rows; thresholds are chosen on dev rows and tried on test rows.")
    columns = {}
    for column in COLUMNS:
        values = [said[key].get(column) for key in kept.ids]
        if all(value is not None for value in values):
            columns[column] = np.array(values, dtype=float)
            if not ((columns[column] >= 0) & (columns[column] <= 1)).all():
                raise BadInput(f"'{name}' has a '{column}' that is no probability.")
    return Predicted(kept, columns)
