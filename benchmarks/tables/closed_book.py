"""White-box figures with 20,000 closed-book train rows: fusion, IK by answer tokens and seed, and their stack.

    python -m benchmarks.tables.closed_book

The protocol is in `policy_protocol.md`. `benchmarks.paper_record` writes the record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.paper_record import CLOSED_BOOK, CURVE, read_record
from benchmarks.policy_white_box import format_auroc
from benchmarks.tables.common import table
from knowgate.stats.metrics import auroc

GROUPS = ("TriviaQA", "NQ")
RESAMPLES = 1_000
LONG, NONE = 32, 0  # answer tokens that the stacked judges read
Rows = list[dict[str, Any]]


def select(group: int, *, test: bool = True) -> Rows:
    """Select the test rows, or the held-out train rows, of a data set."""
    return [row for row in read_record(CLOSED_BOOK) if row["group"] == group and row["test"] == test]


def list_judges() -> dict[int, list[str]]:
    """List the recorded judges by the number of answer tokens that they read."""
    judges: dict[int, list[str]] = {}
    for name in sorted({name for row in read_record(CLOSED_BOOK)[:1] for name in row["ik"]}):
        judges.setdefault(int(name.partition("/")[0]), []).append(name)
    return dict(sorted(judges.items()))


def mean_logits(rows: Rows, tokens: int) -> Any:
    """Return the mean logit over the seeds of a judge."""
    names = list_judges()[tokens]
    return np.array([np.mean([row["ik"][name] for name in names]) for row in rows])


def stack_inputs(rows: Rows) -> Any:
    """Return the inputs of the stack: log-odds of the fusion, and IK's logits with and without the answer."""
    judges = [mean_logits(rows, tokens) for tokens in (LONG, NONE) if tokens in list_judges()]
    return np.column_stack([[row["fusion"]["stack"] for row in rows], *judges])


def score_stack(rows: Rows) -> Any:
    """Return the log-odds of the stack, which is fitted on the held-out train rows of both data sets."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    parts = [select(group, test=False) for group in range(len(GROUPS))]
    held_out = parts[0] + parts[1]
    inputs = np.column_stack([stack_inputs(held_out), [row["group"] for row in held_out]])
    model = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=500))
    model.fit(inputs, [row["right"] for row in held_out])
    return model.decision_function(np.column_stack([stack_inputs(rows), [row["group"] for row in rows]]))


def signal_table() -> str:
    """AUROC of known on the test rows, for each signal."""
    signals: dict[str, Any] = {
        "smallest log-probability": lambda rows: np.array([row["min"] for row in rows]),
        "fusion": lambda rows: np.array([row["fusion"]["all"] for row in rows]),
        **{
            f"IK, {tokens} answer tokens, mean of {len(names)}": lambda rows, tokens=tokens: mean_logits(rows, tokens)
            for tokens, names in list_judges().items()
            if tokens in (LONG, NONE)
        },
        "mean of the log-odds of fusion and IK": lambda rows: stack_inputs(rows)[:, :2].sum(axis=1),
        "stack of fusion and IK": score_stack,
    }
    lines = []
    for name, score in signals.items():
        cells = []
        for group in range(len(GROUPS)):
            rows = select(group)
            cells.append(format_auroc(np.array([row["right"] for row in rows]), np.asarray(score(rows))))
        lines.append((name, *cells))
    return table(("signal", *GROUPS), lines)


def curve_table() -> str:
    """AUROC of the fusion by the number of train rows."""
    lines = []
    for size in (*map(str, CURVE), "all"):
        cells = []
        for group in range(len(GROUPS)):
            rows = select(group)
            scores = np.array([row["fusion"].get(size, np.nan) for row in rows])
            right = np.array([row["right"] for row in rows])
            cells.append("–" if np.isnan(scores).any() else format_auroc(right, scores))
        lines.append((f"{int(size):,}" if size.isdigit() else size, *cells))
    return table(("train rows", *GROUPS), lines)


def token_table() -> str:
    """AUROC of IK by the number of answer tokens that it has read, for each seed and their mean."""
    lines = []
    for tokens, names in list_judges().items():
        cells = [str(tokens)]
        for group in range(len(GROUPS)):
            rows = select(group)
            right = np.array([row["right"] for row in rows])
            each = [auroc(right > 0, np.array([row["ik"][name] for row in rows])) or 0.5 for name in names]
            cells += [" / ".join(f"{value:.3f}" for value in each), format_auroc(right, mean_logits(rows, tokens))]
        lines.append(tuple(cells))
    columns = [f"{group}, {part}" for group in GROUPS for part in ("each seed", "mean of the seeds")]
    return table(("answer tokens read", *columns), lines)


def token_difference() -> str:
    """Paired difference of IK with 32 answer tokens and with none, over seeds that both have."""
    judges, texts = list_judges(), []
    seeds = {name.partition("/")[2] for name in judges.get(LONG, [])}
    seeds &= {name.partition("/")[2] for name in judges.get(NONE, [])}
    for group, title in enumerate(GROUPS):
        rows = select(group)
        right = np.array([row["right"] for row in rows]) > 0
        scores = {
            tokens: np.array([[row["ik"][f"{tokens}/{seed}"] for seed in sorted(seeds)] for row in rows])
            for tokens in (LONG, NONE)
        }

        def difference(draw: Any, right: Any = right, scores: Any = scores) -> float:
            parts = [
                np.mean([auroc(right[draw], scores[tokens][draw, k]) or 0.5 for k in range(len(seeds))])
                for tokens in (LONG, NONE)
            ]
            return float(parts[0] - parts[1])

        generator = np.random.default_rng(0)
        values = [difference(generator.integers(0, len(rows), len(rows))) for _ in range(RESAMPLES)]
        low, high = np.quantile(values, [0.025, 0.975])
        whole = difference(np.arange(len(rows)))
        texts.append(f"{title}: 32 tokens against none {whole:+.3f} [{low:+.3f}, {high:+.3f}], {len(seeds)} seeds.")
    return " ".join(texts)


def closed_book_tables() -> Iterator[str]:
    """The section of the page; nothing without a record."""
    if not read_record(CLOSED_BOOK):
        return
    n_held_out = sum(not row["test"] for row in read_record(CLOSED_BOOK))
    yield "### White box with 20,000 closed-book rows\n"
    yield (
        "12,047 TriviaQA and 9,935 NQ train questions, none of which is in a test set; no samples. Fusion: token "
        "statistics and linear probes of six layers before and after the answer. IK: a LoRA adapter of the LLM itself, one "
        f"epoch, both data sets together, without {n_held_out:,} held-out train rows, on which the stack is fitted. AUROC "
        "of known on 1,500 and 1,333 test questions.\n"
    )
    yield signal_table()
    yield "IK by the number of answer tokens that it reads:\n"
    yield token_table()
    yield token_difference() + "\n"
    yield "Learning curve of the fusion:\n"
    yield curve_table()


if __name__ == "__main__":
    print("\n".join(closed_book_tables()))
