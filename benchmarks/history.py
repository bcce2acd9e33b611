"""Measure the history log: insert rate, neighbor search at 10^3 to 10^6 rows, and both compared with a DH-ICL pass.

    python benchmarks/history.py [--largest 1000000] [--no-model] [--history postgresql://USER@HOST/DATABASE?schema=NEW]

Embeddings are random unit vectors of 384 numbers, the width of the packaged embedding model, so that the search is
measured without the embedding. The embedding of a question is measured separately.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, QUERIES, K = 384, 50, 20


class RandomEmbedder:
    """Embedder that returns a random unit vector for each text."""

    fingerprint = "random"

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def embed(self, texts: Any) -> Any:
        """Return one vector per text."""
        vectors = self._rng.standard_normal((len(texts), WIDTH)).astype(np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def measure_seconds(function: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure_store(largest: int, address: str | None) -> dict[int, float]:
    """Measure inserts and searches of a history log.

    Args:
        largest: Largest number of rows.
        address: Address of an empty database; by default a temporary file.

    Returns:
        Median seconds of a search, by number of rows.
    """
    from knowgate.data.history import open_history
    from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry

    scope, medians = HistoryScope("m", "p"), {}
    with tempfile.TemporaryDirectory() as folder:
        log: Any = open_history(address or str(Path(folder) / "log.db"), RandomEmbedder())
        rows = 0
        for size in (10**3, 10**4, 10**5, 10**6):
            if size > largest:
                break
            start, rows_before = time.perf_counter(), rows
            while rows < size:
                block = range(rows, min(rows + 1000, size))
                log.add([LogEntry(f"question number {i}", KnowledgeLabel.KNOWN, scope) for i in block])
                rows = block[-1] + 1
            rate = (rows - rows_before) / (time.perf_counter() - start)
            first = measure_seconds(lambda: log.search(["warm up"], K, scope))
            if hasattr(log, "wait"):  # Some stores build an index in the background.
                print(f"{size:>9} rows: index ready after {measure_seconds(log.wait):.1f} s more")
            times = sorted(measure_seconds(lambda: log.search(["a question"], K, scope)) for _ in range(QUERIES))
            medians[size] = statistics.median(times)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{size:>9} rows: insert {rate:,.0f}/s, first search (before the index is ready) {first:.2f} s, "
                f"search p50 {medians[size] * 1e3:.1f} ms, p99 {times[-1] * 1e3:.1f} ms, peak memory {peak:.0f} MB"
            )
    return medians


def compare_with_dhicl(medians: dict[int, float]) -> None:
    """Compare the embedding of a question and a search with a forward pass of DH-ICL.

    Args:
        medians: Median seconds of a search, by number of rows.
    """
    from knowgate.gates.dhicl import DhiclGate
    from knowgate.models import load_model
    from knowgate.retrieval.embeddings import SentenceEmbedder
    from knowgate.types import LabelPrompt, Neighbor, Question, Reading

    model, gate, embedder = load_model("smollm"), DhiclGate(), SentenceEmbedder()
    neighbors = tuple(Neighbor(f"Who wrote the famous book with number {i}?", "known", 0.5) for i in range(20))
    reading = Reading(neighbors={"dhicl": neighbors})
    prompts = [gate.build_label_prompts([Question(f"Who wrote Hamlet, part {i}?")], [reading])[0] for i in range(8)]
    uncached = [LabelPrompt((prompt.prefix + prompt.parts[0], *prompt.parts[1:])) for prompt in prompts]
    model.label_logits(uncached[:1], gate.labels), model.label_logits(prompts[:1], gate.labels)
    without_cache = statistics.median(
        measure_seconds(lambda p=p: model.label_logits([p], gate.labels)) for p in uncached
    )
    with_cache = statistics.median(measure_seconds(lambda p=p: model.label_logits([p], gate.labels)) for p in prompts)
    embedder.embed(["warm up"])
    embedding = statistics.median(measure_seconds(lambda: embedder.embed(["Who wrote Hamlet?"])) for _ in range(10))
    print(
        f"DH-ICL pass: {without_cache:.2f} s, {with_cache:.2f} s with the instruction cached: "
        f"{without_cache / with_cache:.2f} times as fast (target > 1)"
    )
    print(f"embedding one question: {embedding * 1e3:.0f} ms, {embedding / with_cache:.1%} of the pass")
    if 10**5 in medians:
        print(f"search at 10^5 rows: {medians[10**5] / with_cache:.1%} of a DH-ICL pass (target <= 5 %)")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=10**6, help="largest number of rows")
    parser.add_argument("--history", help="address of an empty database to fill; default: a temporary file")
    parser.add_argument("--no-model", action="store_true", help="measure the store only")
    options = parser.parse_args()
    medians = measure_store(options.largest, options.history)
    if not options.no_model:
        compare_with_dhicl(medians)


if __name__ == "__main__":
    main()
