"""The baseline of RAG frameworks: retrieve always, and drop the passages if the best one is below a similarity cut-off.

    KNOWGATE_BENCH=... python -m benchmarks.passage_cutoff FOLDER [--json] [--dev]     FOLDER caches the indexes

Committed label runs hold the answers of the LLM with and without passages. The similarity is the BM25 score of the best
passage, divided by the number of words of the question. Below the cut-off the LLM gets no passages, so its closed-book
answer counts. The cut-off is chosen on train rows: the one with the most right answers. Every question is still searched
for, so this saves prompt tokens, but no searches. With --dev, no test row is read: the cut-off is chosen on every second train
row and measured on the others.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.text import tokenize
from knowgate.retrieval import load_retriever
from knowgate.retrieval.index import build_index
from knowgate.stats.bootstrap import estimate_mean

RUNS = Path(__file__).parent / "runs"
LLMS = ("qwen2.5-coder-1.5b", "smollm")
DATA = ("nq", "triviaqa")


def read_rows(llm: str, data: str, split: str) -> list[tuple[str, bool, bool]]:
    """Read question, closed-book grade and open-book grade of each row of a committed run."""
    bench = Path(os.environ["KNOWGATE_BENCH"])
    with gzip.open(bench / f"{data}_ctx" / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
        questions = {row["id"]: row["question"] for row in map(json.loads, file)}
    with gzip.open(RUNS / llm / f"{data}_ctx-{split}" / "labels.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row.get("closed") and row.get("open")]
    return [(questions[row["id"]], bool(row["closed"]["correct"]), bool(row["open"]["correct"])) for row in rows]


def measure_similarity(questions: list[str], data: str, cache: Path) -> dict[str, float]:
    """Return the similarity of the best passage for each question."""
    folder, documents = cache / data, cache / f"{data}.jsonl"
    if not folder.exists():
        corpus = Path(os.environ["KNOWGATE_BENCH"]) / f"corpus_{data}.jsonl.gz"
        documents.write_bytes(gzip.decompress(corpus.read_bytes()))
        build_index(documents, folder, kind="bm25")
    found = load_retriever(str(folder)).search(questions, 1)
    return {
        question: (passages[0].score or 0.0) / max(1, len(tokenize(question))) if passages else 0.0
        for question, passages in zip(questions, found, strict=True)
    }


def choose_cutoff(similarity: np.ndarray, closed: np.ndarray, opened: np.ndarray) -> float:
    """Return the cut-off with the most right answers; the smallest of equally good ones."""
    cutoffs = [0.0, *np.quantile(similarity, np.arange(0.01, 1.0, 0.01)).tolist()]
    return float(cutoffs[int(np.argmax([np.where(similarity >= cut, opened, closed).mean() for cut in cutoffs]))])


def compare(llm: str, data: str, cache: Path, *, is_dev: bool = False) -> dict[str, Any]:
    """Choose the cut-off on train rows and compare it with always retrieving on test rows, or on other train rows."""
    train = read_rows(llm, data, "train")
    tables = (
        {"train": train[::2], "test": train[1::2]} if is_dev else {"train": train, "test": read_rows(llm, data, "test")}
    )
    best = measure_similarity(sorted({row[0] for rows in tables.values() for row in rows}), data, cache)
    arrays = {
        split: (np.array([best[row[0]] for row in rows]), np.array([row[1] for row in rows]), np.array([row[2] for row in rows]))
        for split, rows in tables.items()
    }  # fmt: skip
    cutoff = choose_cutoff(*arrays["train"])
    similarity, closed, opened = arrays["test"]
    right = np.where(similarity >= cutoff, opened, closed)
    difference = estimate_mean(right.astype(float) - opened.astype(float))
    return {
        "n": len(right),
        "never": float(closed.mean()),
        "always": float(opened.mean()),
        "cutoff": cutoff,
        "dropped": float((similarity < cutoff).mean()),
        "right": float(right.mean()),
        "against_always": {"value": difference.value, "low": difference.low, "high": difference.high},
        "searches": 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--dev", action="store_true", help="choose and measure on train rows alone")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    results = {llm: {data: compare(llm, data, options.cache, is_dev=options.dev) for data in DATA} for llm in LLMS}
    if options.json:
        print(json.dumps(results))
        return
    print("| LLM | data | never | always | with cut-off | difference | passages dropped | searches |")
    print("|---|---|---|---|---|---|---|---|")
    for llm, items in results.items():
        for data, item in items.items():
            gap = item["against_always"]
            interval = f"{100 * gap['value']:+.1f} [{100 * gap['low']:+.1f}, {100 * gap['high']:+.1f}]"
            shares = " | ".join(f"{item[name]:.1%}" for name in ("never", "always", "right"))
            print(f"| {llm} | {data} | {shares} | {interval} | {item['dropped']:.0%} | 100% |")


if __name__ == "__main__":
    main()
