"""Read the recorded answers of an 8B LLM behind an API and the predictions of judges. Neither contains any text.

`answers.jsonl.gz` has one row per question of `bench:gate_llama3_8b`. It says which of the recorded answers (closed-book,
with one retrieval, with IRCoT) are right by the data set's own `acc_contains`, whether the first two are the same answer,
and whether only the answer with retrieval abstains.

`judge/NAME.jsonl` has the predictions of a judge, as probabilities. Before retrieval: "known" (the closed-book answer is
right) and "found" (the answer with retrieval would be right). After retrieval: "closed" and "open", the same for both
answers. Rows of the split "dev" belong to the train split, but the judge was not trained on them. Thresholds are chosen
on dev rows and measured on test rows.
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
    """Grades of the recorded answers to the questions of one split.

    Attributes:
        ids: Question ids.
        sets: Name of the data set of each question.
        closed: Whether the closed-book answer is right.
        open: Whether the answer with one retrieval is right.
        several: Whether the answer with several retrievals (IRCoT) is right.
        same: Whether the closed-book answer and the answer with one retrieval are the same.
        rules_prefer_closed_book: Whether only the answer with retrieval abstains, so that the rules take the closed-book answer.
    """

    ids: list[str]
    sets: list[str]
    closed: Bools
    open: Bools
    several: Bools
    same: Bools
    rules_prefer_closed_book: Bools

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, indices: Sequence[int] | NDArray[Any]) -> Answers:
        """Return the rows at these indices."""
        chosen = np.asarray(indices, dtype=np.int64)
        names = [[column[index] for index in chosen] for column in (self.ids, self.sets)]
        columns = (self.closed, self.open, self.several, self.same, self.rules_prefer_closed_book)
        return Answers(names[0], names[1], *(column[chosen] for column in columns))


def write_answers(out: Path) -> None:
    """Write `answers.jsonl.gz` from the data set."""
    from knowgate.data.questions import load_questions

    lines = [
        json.dumps(_make_row(question, split)) + "\n"
        for split in ("train", "test")
        for question in load_questions(f"{DATA}/{split}")
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    # Without a name and a time in the header, the same answers give the same bytes.
    with out.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write("".join(lines).encode())


def _make_row(question: Any, split: str) -> dict[str, Any]:
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
    """Read the graded answers of a split ("train" or "test")."""
    file = home / ANSWERS
    return _read_answers(file, split, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read_answers(file: Path, split: str, modified: int) -> Answers:
    """Read the answers once for all judges. `modified` is part of the cache key: a changed file is read again."""
    rows = [row for _, row in read_jsonl(file) if row["split"] == split]
    columns = [np.array([row[name] for row in rows], dtype=bool) for name in (*KEYS, "same", "rules")]
    return Answers([row["id"] for row in rows], [row["set"] for row in rows], *columns)


@dataclass(frozen=True)
class SplitPredictions:
    """Predictions of a judge for the rows of one split.

    Attributes:
        answers: Graded answers of the rows that have predictions.
        columns: Probability of a right answer per row, by column name (`COLUMNS`).
    """

    answers: Answers
    columns: Mapping[str, Floats]

    @property
    def can_arbitrate(self) -> bool:
        """Whether the predictions can choose between the two answers after retrieval."""
        return {"closed", "open"} <= set(self.columns)

    @property
    def arbiter_prefers_closed_book(self) -> Bools:
        """Whether the arbiter takes the closed-book answer, per row."""
        return ~self.answers.same & (self.columns["closed"] > self.columns["open"])

    @property
    def arbiter_right(self) -> Bools:
        """Whether the answer that the arbiter takes after retrieval is right, per row."""
        return np.where(self.arbiter_prefers_closed_book, self.answers.closed, self.answers.open)


@dataclass(frozen=True)
class Judge:
    """Recorded predictions of one judge.

    Attributes:
        name: Name of the predictions file.
        dev: Predictions for rows of the train split that the judge was not trained on.
        test: Predictions for the test rows.
        about: Record of the training (base model, rows, seconds); empty if there is none.
    """

    name: str
    dev: SplitPredictions
    test: SplitPredictions
    about: Mapping[str, Any]


def judge_names(home: Path) -> list[str]:
    """Return the names of all recorded judges."""
    return sorted(file.stem for file in (home / JUDGES).glob("*.jsonl"))


def read_judge(home: Path, name: str) -> Judge:
    """Read the predictions of a judge.

    Raises:
        BadInput: The predictions lack rows, name unknown rows or contain values that are not probabilities.
    """
    file = home / JUDGES / f"{name}.jsonl"
    rows = [row for _, row in read_jsonl(file)]
    about_file = file.with_suffix(".json")
    about = json.loads(about_file.read_text(encoding="utf-8")) if about_file.is_file() else {}
    return Judge(name, *(_read_split(home, rows, split, name) for split in ("dev", "test")), about)


def _read_split(home: Path, rows: Sequence[Mapping[str, Any]], split: str, name: str) -> SplitPredictions:
    answers = read_answers(home, "test" if split == "test" else "train")
    predictions = {row["id"]: row for row in rows if row["split"] == split}
    unknown = sorted(set(predictions) - set(answers.ids))
    if unknown:
        raise BadInput(
            f"'{name}' has predictions for {len(unknown)} {split} rows that are not in {ANSWERS}, first '{unknown[0]}'. "
            "Remove them or record the answers again."
        )
    selected = answers.select([index for index, key in enumerate(answers.ids) if key in predictions])
    if split == "test" and len(selected) < len(answers):
        raise BadInput(
            f"'{name}' has predictions for {len(selected)} of {len(answers)} test rows. Predict all of them."
        )
    if not len(selected):
        raise BadInput(f"'{name}' has no {split} rows. Thresholds are chosen on dev rows and measured on test rows.")
    columns = {}
    for column in COLUMNS:
        values = [predictions[key].get(column) for key in selected.ids]
        if all(value is not None for value in values):
            columns[column] = np.array(values, dtype=float)
            if not ((columns[column] >= 0) & (columns[column] <= 1)).all():
                raise BadInput(f"'{name}' has a value in '{column}' that is not a probability from 0 to 1.")
    return SplitPredictions(selected, columns)
