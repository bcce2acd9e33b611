"""Write the predictions of `policy_training.py` as compact records: ids and numbers, no questions and no answers.

    python -m benchmarks.policy_record --bench DATA --rows FOLDER --trained FOLDER

Row of a record: id, fold (-1 for test rows), grades of the closed-book and the open-book answer, whether the free rules
give the closed-book answer, and the logits of P(closed right) and P(open right) after the question, after the
closed-book answer and after both answers. Train rows have the logits of the adapter that did not learn from them, test
rows the mean of all four. Columns of another set's adapters are named after that set.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.policy_sets import RECORDED_SETS, RecordedRow, read_recorded
from knowgate.gates.arbiters.abstention import RulesArbiter

HOME = Path(__file__).parent / "runs" / "policy"
ARBITER = Path(__file__).parent / "runs" / "llama3.1-8b" / "judge" / "arbiter-1.5b.jsonl"
FOLDS = 4
TRAINED = ("llama3_8b", "gpt4_nq", "chatgpt_nq", "davinci3_nq", "gpt3_realtimeqa", "mixed")


def read_logits(trained: Path, judge: str, name: str, folds: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return the logits of a judge's adapters for the rows of a set; None if they did not score it."""
    total = np.zeros((len(folds), 3, 2))
    count = np.zeros(len(folds))
    for member in range(FOLDS):
        scores = np.load(trained / f"{judge}-{member}.npz")
        sets = scores["sets"].tolist()
        if name not in sets:
            return None
        rows = scores["source"] == sets.index(name)
        total[scores["index"][rows]] += scores["logits"][rows]
        count[scores["index"][rows]] += 1
    return total / np.maximum(count, 1)[:, None, None]


def read_arbiter(name: str) -> dict[str, int]:
    """Return whether the arbiter on record gives the closed-book answer, by row id; only Llama-3.1-8B has one."""
    if name != "llama3_8b":
        return {}
    rows = [json.loads(line) for line in ARBITER.read_text(encoding="utf-8").splitlines()]
    return {row["id"]: int(row["closed"] > row["open"]) for row in rows}


def write_set(out: Path, name: str, rows: list[RecordedRow], columns: dict[str, Any], folds: Any) -> None:
    """Write one row per question."""
    arbiter = read_arbiter(name)
    rules = RulesArbiter()
    with gzip.GzipFile(out / f"{name}.jsonl.gz", "wb", mtime=0) as file:
        for number, row in enumerate(rows):
            record = {
                "id": row.id,
                "fold": int(folds[number]),
                "closed": int(row.closed_right),
                "open": int(row.open_right),
                "rules": int(rules.abstains(row.open) and not rules.abstains(row.closed)),
                **({"arbiter": arbiter.get(row.id)} if arbiter else {}),
                **{judge: np.round(logits[number], 3).ravel().tolist() for judge, logits in columns.items()},
            }
            file.write((json.dumps(record) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="output of policy_rows")
    parser.add_argument("--trained", type=Path, required=True, help="output of policy_training")
    options = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    for name in RECORDED_SETS:
        folds = np.load(options.rows / f"{name}.npz")["folds"]
        columns = {judge: read_logits(options.trained, judge, name, folds) for judge in TRAINED}
        write_set(
            HOME, name, read_recorded(options.bench, name), {k: v for k, v in columns.items() if v is not None}, folds
        )
    facts = {
        judge: [json.loads(str(np.load(options.trained / f"{judge}-{k}.npz")["facts"])) for k in range(FOLDS)]
        for judge in TRAINED
    }
    (HOME / "trainings.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
