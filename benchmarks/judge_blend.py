"""Blend the predictions of several judges.

    python -m benchmarks.judge_blend FOLDER --recipes judge-1.5b arbiter-1.5b all-1.5b --name cascade

Averages each column as log-odds, and calibrates it to probabilities on the dev rows. The arbiter's columns "closed" and
"open" are computed from all columns, since the judge's prediction before retrieval helps after retrieval, too.

Reads and writes the files of `judge_train.py`. Prints AUROC, the arbiter's accuracy and the accuracy of cascades at
several retrieval rates, with thresholds chosen on dev rows, for each recipe alone and for the blend.
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
from benchmarks.judge_train import COLUMN_SIDES
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
    """Scores of the rows of one split.

    Attributes:
        cases: The rows.
        columns: Scores of all rows, by column.
    """

    cases: list[Case]
    columns: Columns

    def right(self, side: str) -> NDArray[np.bool_]:
        """Return whether the answer of this side is right, per row."""
        return np.array([case.right[side] for case in self.cases], dtype=bool)

    @property
    def answers_differ(self) -> NDArray[np.bool_]:
        """Whether the closed-book answer and the answer with retrieval differ, per row."""
        return np.array([not case.closed_book_equals("open") for case in self.cases], dtype=bool)


def load_blend(folder: Path, names: Sequence[str], cases: Mapping[str, Case]) -> dict[str, Scores]:
    """Average the predictions of recipes over the rows that all of them scored, and calibrate them.

    Args:
        folder: Folder of the predictions.
        names: Names of the recipes.
        cases: All rows, by id.

    Returns:
        Scores by split ("dev" and "test").
    """
    tables = [_read_predictions(folder / f"{name}.jsonl") for name in names]
    odds = {}
    for split in SPLITS:
        ids = [key for key in tables[0][split] if all(key in table[split] for table in tables)]
        columns = {}
        for column in COLUMN_SIDES:
            sources = [table[split] for table in tables if table[split][ids[0]].get(column) is not None]
            if sources:
                columns[column] = np.mean([[logit(rows[key][column]) for key in ids] for rows in sources], axis=0)
        odds[split] = Scores([cases[key] for key in ids], columns)
    return _calibrate(odds)


def _read_predictions(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the rows of a predictions file, by split and id."""
    table: dict[str, dict[str, dict[str, Any]]] = {split: {} for split in SPLITS}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        table[row["split"]][row["id"]] = row
    return table


def _calibrate(odds: dict[str, Scores]) -> dict[str, Scores]:
    """Turn log-odds into probabilities with calibrations fitted on dev rows.

    Each column is calibrated by Platt scaling. If the predictions include the judge's, the arbiter's columns are then
    replaced by a logistic regression over all columns.
    """
    dev = odds["dev"]
    calibrations = {
        column: fit_platt_scaling(sigmoid(values), dev.right(COLUMN_SIDES[column]))
        for column, values in dev.columns.items()
    }
    calibrated = {
        split: Scores(
            scores.cases,
            {c: apply_calibration(sigmoid(values), calibrations[c]) for c, values in scores.columns.items()},
        )
        for split, scores in odds.items()
    }
    if not {"closed", "open", "known"} <= set(dev.columns):
        return calibrated
    for column in ("closed", "open"):
        for split, probabilities in _stack_columns(odds, dev.right(COLUMN_SIDES[column])).items():
            calibrated[split].columns[column] = probabilities
    return calibrated


def _stack_columns(odds: dict[str, Scores], right: NDArray[np.bool_]) -> dict[str, Floats]:
    """Predict the probability of a right answer from all columns. Dev rows are scored out of fold."""
    dev, test = (np.column_stack(list(odds[split].columns.values())) for split in SPLITS)
    folds = assign_folds([case.question.text for case in odds["dev"].cases], FOLDS)
    out_of_fold = np.zeros(len(dev))
    for k in range(FOLDS):
        in_fold = folds == k
        if in_fold.any():
            out_of_fold[in_fold] = _fit_logistic_regression(dev[~in_fold], right[~in_fold])(dev[in_fold])
    return {"dev": out_of_fold, "test": _fit_logistic_regression(dev, right)(test)}


def _fit_logistic_regression(odds: Floats, right: NDArray[np.bool_]) -> Callable[[Floats], Floats]:
    from sklearn.linear_model import LogisticRegression

    mean, deviation = odds.mean(axis=0), odds.std(axis=0) + 1e-9
    model = LogisticRegression(max_iter=2_000).fit((odds - mean) / deviation, right)
    return lambda rows: np.asarray(model.predict_proba((rows - mean) / deviation)[:, 1], dtype=np.float64)


def arbiter_right(scores: Scores) -> NDArray[np.bool_]:
    """Return whether the answer that the arbiter takes is right, per row. Equal answers need no choice."""
    closed, opened = scores.columns["closed"], scores.columns["open"]
    prefers_closed_book = scores.answers_differ & (closed > opened)
    return np.where(prefers_closed_book, scores.right("closed"), scores.right("open"))


def measure_cascade(blend: dict[str, Scores], rule: str) -> dict[str, dict[str, float]]:
    """Return accuracy and retrieval rate of the cascade at each rate in `RATES`, with thresholds chosen on dev rows.

    Args:
        blend: Scores by split.
        rule: Kind of need: "known", or "gain" for the expected gain from documents.
    """
    needs = {split: _compute_needs(scores, rule) for split, scores in blend.items()}
    table = {}
    for rate in RATES:
        threshold = np.quantile(needs["dev"], 1 - rate)
        cells = {}
        for split, scores in blend.items():
            retrieve = needs[split] > threshold
            cells[split] = float(np.where(retrieve, arbiter_right(scores), scores.right("closed")).mean())
            cells[f"{split}_rate"] = float(retrieve.mean())
        table[str(rate)] = {name: round(value, 4) for name, value in cells.items()}
    return table


def _compute_needs(scores: Scores, rule: str) -> Floats:
    known = scores.columns["known"]
    return scores.columns["found"] - known if rule == "gain" else -known


def summarize(blend: dict[str, Scores]) -> dict[str, Any]:
    """Return AUROC, the arbiter's accuracy and the cascades of a blend."""
    summary: dict[str, Any] = {}
    for split, scores in blend.items():
        summary[split] = {
            "rows": len(scores.cases),
            "never": round(float(scores.right("closed").mean()), 4),
            "always": round(float(scores.right("open").mean()), 4),
            "auroc": {c: round(auroc(scores.right(COLUMN_SIDES[c]), p) or 0.0, 4) for c, p in scores.columns.items()},
        }
        if {"closed", "open"} <= set(scores.columns):
            summary[split]["arbiter"] = round(float(arbiter_right(scores).mean()), 4)
    columns = set(blend["dev"].columns)
    if {"known", "closed", "open"} <= columns:
        rules = ("known", "gain") if "found" in columns else ("known",)
        summary["cascade"] = {rule: measure_cascade(blend, rule) for rule in rules}
    return summary


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the predictions")
    parser.add_argument("--recipes", nargs="+", required=True, help="names of the recipes to blend")
    parser.add_argument("--name", default="cascade", help="name of the blend")
    parser.add_argument("--limit", type=int, help="the --limit that the predictions were made with")
    options = parser.parse_args()
    cases = {case.question.id: case for split in ("train", "test") for case in load_cases(split, options.limit)}
    for names in [*([name] for name in options.recipes), options.recipes]:
        blend = load_blend(options.folder, names, cases)
        summary = summarize(blend)
        print(" + ".join(names), json.dumps(summary, indent=1), flush=True)
    rows = []
    for split, scores in blend.items():
        for index, case in enumerate(scores.cases):
            cells = {c: round(float(scores.columns[c][index]), 5) for c in COLUMN_SIDES if c in scores.columns}
            rows.append(json.dumps({"id": case.question.id, "split": split, **cells}) + "\n")
    write_text(options.folder / f"{options.name}.jsonl", "".join(rows))
    write_json(options.folder / f"{options.name}.json", {"blend_of": options.recipes, **summary})


if __name__ == "__main__":
    main()
