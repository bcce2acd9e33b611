"""White-box figures of the policy benchmark: token statistics, adapters of the LLM itself, and their stack.

    python -m benchmarks.policy_white_box                                 # tables, from the committed record
    python -m benchmarks.policy_white_box --record --rows FOLDER --trained FOLDER

Qwen2.5-Coder-1.5B answered 24,815 questions closed book. The record holds ids, grades, token statistics of the answers,
and the logits of three adapters after 0, 1, 4, 16 and 32 tokens of the answer.
"""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables.common import table
from knowgate.stats.bootstrap import estimate_auroc
from knowgate.stats.metrics import auroc

FILE = Path(__file__).parent / "runs" / "policy" / "white_box.jsonl.gz"
GROUPS = ("TriviaQA", "NQ")
ADAPTERS = 3
READ_TOKENS = (0, 1, 4, 16, 32)
CURVE = (500, 1500, 5000, 12000)
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class WhiteBoxRows:
    """Closed-book answers: data set, fold (-1: test), grade, token statistics, and logits of the adapters.

    `logits` has one value per adapter and number of tokens read; NaN where the adapter did not score the row.
    """

    groups: np.ndarray[Any, Any]
    folds: np.ndarray[Any, Any]
    right: np.ndarray[Any, Any]
    statistics: Floats
    logits: Floats

    @property
    def honest_logits(self) -> Floats:
        """Mean over the adapters that did not learn from a row: one for train rows, all for test rows."""
        scored = ~np.isnan(self.logits)
        total = np.where(scored, self.logits, 0.0).sum(axis=1)
        return np.asarray(total / np.maximum(scored.sum(axis=1), 1))


@cache
def load_rows() -> WhiteBoxRows:
    """Load the record."""
    with gzip.open(FILE, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    logits = np.full((len(rows), ADAPTERS, len(READ_TOKENS)), np.nan)
    for number, row in enumerate(rows):
        for member, values in row["logits"].items():
            logits[number, int(member)] = values
    return WhiteBoxRows(
        *(np.array([row[key] for row in rows]) for key in ("group", "fold", "right")),
        np.array([row["statistics"] for row in rows]),
        logits,
    )


def fit_and_score(inputs: Floats, right: Any, train: Any, test: Any) -> Floats:
    """Fit a logistic regression with standardized inputs and pairwise products; return its scores of test rows."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    model = make_pipeline(
        StandardScaler(),
        PolynomialFeatures(2, include_bias=False),
        StandardScaler(),
        LogisticRegression(C=0.03, max_iter=500),
    )
    return np.asarray(model.fit(inputs[train], right[train]).predict_proba(inputs[test])[:, 1])


def format_auroc(right: Any, scores: Floats) -> str:
    """Format an AUROC with its 95 % interval."""
    estimate = estimate_auroc(right.astype(bool), scores, 1000)
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def signal_table() -> str:
    """AUROC of known on the test rows of both data sets, for each signal."""
    rows = load_rows()
    scored = (rows.folds >= 0) & (rows.folds < ADAPTERS)
    logits = rows.honest_logits
    inputs = {
        "smallest log-probability": None,
        "token statistics": rows.statistics,
        "adapters, question alone": logits[:, :1],
        "adapters, whole answer": logits[:, -1:],
        "stack": np.hstack([rows.statistics, logits]),
    }
    lines = []
    for name, values in inputs.items():
        cells = []
        for group in range(len(GROUPS)):
            test = (rows.groups == group) & (rows.folds < 0)
            if values is None:
                scores = rows.statistics[test, 2]
            elif name.startswith("adapters"):
                scores = values[test, 0]
            else:
                scores = fit_and_score(values, rows.right, scored & (rows.groups == group), test)
            cells.append(format_auroc(rows.right[test], scores))
        lines.append((name, *cells))
    return table(("signal", *GROUPS), lines)


def token_table() -> str:
    """AUROC of each adapter by the number of answer tokens that it has read (IK)."""
    rows = load_rows()
    lines = []
    for number, tokens in enumerate(READ_TOKENS):
        cells = [str(tokens)]
        for group in range(len(GROUPS)):
            test = (rows.groups == group) & (rows.folds < 0)
            each = [auroc(rows.right[test] > 0, rows.logits[test, k, number]) or 0.5 for k in range(ADAPTERS)]
            mean = format_auroc(rows.right[test], rows.honest_logits[test, number])
            cells += [" / ".join(f"{value:.3f}" for value in each), mean]
        lines.append(tuple(cells))
    names = [f"{group}, {part}" for group in GROUPS for part in ("each adapter", "mean of three")]
    return table(("answer tokens read", *names), lines)


def mean_token_aurocs(group: int) -> dict[int, float]:
    """Return the AUROC of the adapters' mean logit on a data set, by the number of answer tokens that they read."""
    rows = load_rows()
    test = (rows.groups == group) & (rows.folds < 0)
    scores = rows.honest_logits[test]
    return {tokens: auroc(rows.right[test] > 0, scores[:, column]) or 0.5 for column, tokens in enumerate(READ_TOKENS)}


def token_difference_lines() -> list[str]:
    """Paired difference of the AUROC with 32 tokens and with none, in words."""
    rows, lines = load_rows(), []
    for group, name in enumerate(GROUPS):
        test = np.flatnonzero((rows.groups == group) & (rows.folds < 0))
        right, scores = rows.right[test] > 0, rows.honest_logits[test]
        generator, values = np.random.default_rng(0), []
        for _ in range(1000):
            draw = generator.integers(0, len(test), len(test))
            parts = [auroc(right[draw], scores[draw, column]) or 0.5 for column in (-1, 0)]
            values.append(parts[0] - parts[1])
        low, high = np.quantile(values, [0.025, 0.975])
        lines.append(f"{name}: 32 tokens against none {np.mean(values):+.3f} [{low:+.3f}, {high:+.3f}].")
    return [" ".join(lines)]


@cache
def curve_table() -> str:
    """AUROC of the token statistics by the number of train rows."""
    rows = load_rows()
    lines = []
    for size in CURVE:
        cells = []
        for group in range(len(GROUPS)):
            train = np.flatnonzero((rows.groups == group) & (rows.folds >= 0))
            test = (rows.groups == group) & (rows.folds < 0)
            draws = 3 if size < len(train) else 1
            values = [
                auroc(
                    rows.right[test] > 0,
                    fit_and_score(
                        rows.statistics, rows.right, np.random.default_rng(k).permutation(train)[:size], test
                    ),
                )
                for k in range(draws)
            ]
            cells.append(f"{np.mean([value or 0.5 for value in values]):.3f}")
        lines.append((f"{size:,}", *cells))
    return table(("train rows (NQ: at most 9,935)", *GROUPS), lines).strip()


def write_record(rows_folder: Path, trained: Path) -> None:
    """Write the record from the output of `policy_rows` and `policy_training`."""
    answers = np.load(trained / "white_box.npz")
    features = np.load(trained / "closed_features.npz")["features"]
    size = features[:, 9] % 100
    statistics = np.column_stack([features[:, :9], np.log1p(size), features[:, 9] >= 100])
    members = [np.load(trained / f"white_box_short-{k}.npz") for k in range(ADAPTERS)]
    scores = [dict(zip(each["index"].tolist(), each["logits"][:, :, 0], strict=True)) for each in members]
    with gzip.open(rows_folder / "closed_book.jsonl.gz", "rt", encoding="utf-8") as lines:
        ids = [json.loads(line)["id"] for line in lines]
    with gzip.GzipFile(FILE, "wb", mtime=0) as file:
        for number, key in enumerate(ids):
            record = {
                "id": key,
                "group": int(answers["group"][number]),
                "fold": int(answers["folds"][number]),
                "right": int(answers["targets"][number, 0]),
                "statistics": np.round(statistics[number].astype(float), 3).tolist(),
                "logits": {
                    str(k): np.round(each[number].astype(float), 2).tolist()
                    for k, each in enumerate(scores)
                    if number in each
                },
            }
            file.write((json.dumps(record) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the record")
    parser.add_argument("--rows", type=Path, help="output of policy_rows")
    parser.add_argument("--trained", type=Path, help="output of policy_training")
    options = parser.parse_args()
    if options.record:
        write_record(options.rows, options.trained)
    for make in (signal_table, token_table, curve_table):
        print(make())


if __name__ == "__main__":
    main()
