"""Predictions of several judges put together: columns averaged as log-odds, then made probabilities on the dev rows;
those of the arbiter from all columns together, for the judge's opinion counts after retrieval, too.

    python -m benchmarks.judge_blend FOLDER --recipes judge-1.5b arbiter-1.5b all-1.5b --name cascade

Reads and writes the files of `judge_train.py`. Prints AUROC, the arbiter's accuracy and what a cascade gives at some
rates of retrieval, thresholds chosen on dev rows; for each single recipe too, so that one sees what the blend is worth.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.judge_recipes import FOLDS, Case, load_cases
from benchmarks.judge_train import SIDE
from knowgate.core.files import write_json, write_text
from knowgate.gates.artifacts.networks import apply_calibration
from knowgate.stats.metrics import auroc, logit, sigmoid
from knowgate.training.classifiers import fit_platt_scaling
from knowgate.training.judges.ensemble import assign_folds

RATES = (0.9, 0.8, 0.7, 0.6, 0.5)
SPLITS = ("dev", "test")
Floats = NDArray[np.float64]
Columns = dict[str, Floats]


@dataclass(frozen=True)
class Scores:
    """Rows of a split with the scores they got."""

    cases: list[Case]
    columns: Columns

    def right(self, side: str) -> NDArray[np.bool_]:
        return np.array([case.right[side] for case in self.cases], dtype=bool)

    @property
    def differs(self) -> NDArray[np.bool_]:
        return np.array([not case.same("open") for case in self.cases], dtype=bool)


def load(folder: Path, names: Sequence[str], cases: Mapping[str, Case]) -> dict[str, Scores]:
    """The mean of these recipes, over the rows that all of them scored."""
    tables = [_table(folder / f"{name}.jsonl") for name in names]
    found = {}
    for split in SPLITS:
        ids = [key for key in tables[0][split] if all(key in table[split] for table in tables)]
        columns = {}
        for column in SIDE:
            having = [table[split] for table in tables if table[split][ids[0]].get(column) is not None]
            if having:
                columns[column] = np.mean([[logit(rows[key][column]) for key in ids] for rows in having], axis=0)
        found[split] = Scores([cases[key] for key in ids], columns)
    return _calibrated(found)


def _table(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    table: dict[str, dict[str, dict[str, Any]]] = {split: {} for split in SPLITS}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        table[row["split"]][row["id"]] = row
    return table


def _calibrated(found: dict[str, Scores]) -> dict[str, Scores]:
    """Log-odds to probabilities, learnt on dev: before retrieval by Platt's two numbers for each column; after it, what
    is known by then speaks together (`_stacked`)."""
    dev = found["dev"]
    maps = {column: fit_platt_scaling(sigmoid(odds), dev.right(SIDE[column])) for column, odds in dev.columns.items()}
    alone = {
        split: Scores(one.cases, {c: apply_calibration(sigmoid(odds), maps[c]) for c, odds in one.columns.items()})
        for split, one in found.items()
    }
    if not {"closed", "open", "known"} <= set(dev.columns):
        return alone
    for column in ("closed", "open"):
        for split, values in _stacked(found, dev.right(SIDE[column])).items():
            alone[split].columns[column] = values
    return alone


def _stacked(found: dict[str, Scores], right: NDArray[np.bool_]) -> dict[str, Floats]:
    """P(right) from the log-odds of all columns. Dev rows are told by fits on the other four fifths of them."""
    dev, test = (np.column_stack(list(found[split].columns.values())) for split in SPLITS)
    fold = assign_folds([case.question.text for case in found["dev"].cases], FOLDS)
    told = np.zeros(len(dev))
    for k in range(FOLDS):
        there = fold == k
        if there.any():
            told[there] = _fitted(dev[~there], right[~there])(dev[there])
    return {"dev": told, "test": _fitted(dev, right)(test)}


def _fitted(odds: Floats, right: NDArray[np.bool_]) -> Callable[[Floats], Floats]:
    from sklearn.linear_model import LogisticRegression

    middle, spread = odds.mean(axis=0), odds.std(axis=0) + 1e-9
    model = LogisticRegression(max_iter=2_000).fit((odds - middle) / spread, right)
    return lambda rows: np.asarray(model.predict_proba((rows - middle) / spread)[:, 1], dtype=np.float64)


def chosen_right(scores: Scores) -> NDArray[np.bool_]:
    """Whether the answer the arbiter gives is right; where both say the same nothing is chosen."""
    closed, opened = scores.columns["closed"], scores.columns["open"]
    takes_closed = scores.differs & (closed > opened)
    return np.where(takes_closed, scores.right("closed"), scores.right("open"))


def cascade(found: dict[str, Scores], rule: str) -> dict[str, dict[str, float]]:
    """Accuracy and the rate that came out at each wanted rate. rule: known, or gain (what documents would add)."""
    need = {split: _need(scores, rule) for split, scores in found.items()}
    table = {}
    for rate in RATES:
        edge = np.quantile(need["dev"], 1 - rate)
        cells = {}
        for split, scores in found.items():
            goes = need[split] > edge
            cells[split] = float(np.where(goes, chosen_right(scores), scores.right("closed")).mean())
            cells[f"{split}_rate"] = float(goes.mean())
        table[str(rate)] = {name: round(value, 4) for name, value in cells.items()}
    return table


def _need(scores: Scores, rule: str) -> Floats:
    known = scores.columns["known"]
    return scores.columns["found"] - known if rule == "gain" else -known


def summary(found: dict[str, Scores]) -> dict[str, Any]:
    """What the scores are worth."""
    told: dict[str, Any] = {}
    for split, scores in found.items():
        told[split] = {
            "rows": len(scores.cases),
            "never": round(float(scores.right("closed").mean()), 4),
            "always": round(float(scores.right("open").mean()), 4),
            "auroc": {c: round(auroc(scores.right(SIDE[c]), p) or 0.0, 4) for c, p in scores.columns.items()},
        }
        if {"closed", "open"} <= set(scores.columns):
            told[split]["arbiter"] = round(float(chosen_right(scores).mean()), 4)
    columns = set(found["dev"].columns)
    if {"known", "closed", "open"} <= columns:
        told["cascade"] = {
            rule: cascade(found, rule) for rule in ("known", "gain") if rule == "known" or "found" in columns
        }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the predictions lie")
    parser.add_argument("--recipes", nargs="+", required=True, help="names of those to be put together")
    parser.add_argument("--name", default="cascade", help="name of the blend")
    parser.add_argument("--limit", type=int, help="as the predictions were made")
    options = parser.parse_args()
    cases = {case.question.id: case for split in ("train", "test") for case in load_cases(split, options.limit)}
    for names in [*([name] for name in options.recipes), options.recipes]:
        found = load(options.folder, names, cases)
        told = summary(found)
        print(" + ".join(names), json.dumps(told, indent=1), flush=True)
    rows = []
    for split, scores in found.items():
        for place, case in enumerate(scores.cases):
            cells = {c: round(float(scores.columns[c][place]), 5) for c in SIDE if c in scores.columns}
            rows.append(json.dumps({"id": case.question.id, "split": split, **cells}) + "\n")
    write_text(options.folder / f"{options.name}.jsonl", "".join(rows))
    write_json(options.folder / f"{options.name}.json", {"blend_of": options.recipes, **told})


if __name__ == "__main__":
    main()
