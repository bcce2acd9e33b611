"""Write the predictions of `policy_training.py` as compact records: ids and numbers, no questions and no answers.

    python -m benchmarks.policy_record --bench DATA --rows FOLDER --trained FOLDER
    python -m benchmarks.policy_record --add-pooled --rows FOLDER --trained FOLDER

Row of a record: id, fold (-1 for test rows), grades of the closed-book and the open-book answer, whether the free rules
give the closed-book answer, and the logits of P(closed right) and P(open right) after the question, after the
closed-book answer and after both answers. Train rows have the logits of the adapter that did not learn from them, test
rows the mean of all four. Columns of another set's adapters are named after that set. `--add-pooled` adds the column of the
pooled adapters to the records at hand.
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
POOLED = "pooled"
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
                "closed": int(row.closed_book_right),
                "open": int(row.open_book_right),
                "rules": int(rules.abstains(row.open) and not rules.abstains(row.closed)),
                **({"arbiter": arbiter.get(row.id)} if arbiter else {}),
                **{judge: np.round(logits[number], 3).ravel().tolist() for judge, logits in columns.items()},
            }
            file.write((json.dumps(record) + "\n").encode())


def add_pooled(home: Path, rows: Path, trained: Path) -> None:
    """Add the logits of the pooled adapters to the records; everything else in them stays as it is."""
    for name in RECORDED_SETS:
        file = home / f"{name}.jsonl.gz"
        logits = read_logits(trained, POOLED, f"{name}.named", np.load(rows / f"{name}.named.npz")["folds"])
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            records = [json.loads(line) for line in lines]
        if logits is None or len(logits) != len(records):
            raise SystemExit(f"{file.name} has {len(records)} rows, and the pooled adapters scored other rows.")
        for record, values in zip(records, np.round(logits, 3), strict=True):
            record[POOLED] = values.ravel().tolist()
        with gzip.GzipFile(file, "wb", mtime=0) as out:
            out.write("".join(json.dumps(record) + "\n" for record in records).encode())
    facts = json.loads((home / "trainings.json").read_text(encoding="utf-8"))
    write_facts(home, {**facts, POOLED: read_facts(trained, POOLED)})


def read_facts(trained: Path, judge: str) -> list[Any]:
    """Return duration, losses and settings of the trainings of a judge's adapters."""
    return [json.loads(str(np.load(trained / f"{judge}-{member}.npz")["facts"])) for member in range(FOLDS)]


def write_facts(home: Path, facts: dict[str, list[Any]]) -> None:
    """Write the facts about all trainings."""
    (home / "trainings.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path)
    parser.add_argument("--rows", type=Path, required=True, help="output of policy_rows")
    parser.add_argument("--trained", type=Path, required=True, help="output of policy_training")
    parser.add_argument("--add-pooled", action="store_true", help="only add the pooled adapters to the records at hand")
    options = parser.parse_args()
    if options.add_pooled:
        add_pooled(HOME, options.rows, options.trained)
        return
    if options.bench is None:
        parser.error("--bench is missing: it names the folder of the benchmark data.")
    HOME.mkdir(parents=True, exist_ok=True)
    for name in RECORDED_SETS:
        folds = np.load(options.rows / f"{name}.npz")["folds"]
        columns = {judge: read_logits(options.trained, judge, name, folds) for judge in TRAINED}
        write_set(
            HOME, name, read_recorded(options.bench, name), {k: v for k, v in columns.items() if v is not None}, folds
        )
    write_facts(HOME, {judge: read_facts(options.trained, judge) for judge in TRAINED})


if __name__ == "__main__":
    main()
