"""The log: insert rate, neighbour search at 10^3 ... 10^6 rows, and what that is of a DH-ICL pass.

    python benchmarks/history.py [--largest 1000000] [--no-model] [--history postgresql://USER@HOST/DATABASE?schema=NEW]

Vectors are random unit vectors of 384 numbers (the embedded embedding's width), so the embedding itself costs nothing
here; it is timed apart.
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
    """A unit vector per text, from nowhere."""

    fingerprint = "random"

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def embed(self, texts: Any) -> Any:
        vectors = self._rng.standard_normal((len(texts), WIDTH)).astype(np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def store_speed(largest: int, address: str | None) -> dict[int, float]:
    from knowgate.data.history import open_history
    from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry

    scope, medians = HistoryScope("m", "p"), {}
    with tempfile.TemporaryDirectory() as folder:
        log: Any = open_history(address or str(Path(folder) / "log.db"), RandomEmbedder())
        rows = 0
        for size in (10**3, 10**4, 10**5, 10**6):
            if size > largest:
                break
            started, before = time.perf_counter(), rows
            while rows < size:
                block = range(rows, min(rows + 1000, size))
                log.add([LogEntry(f"question number {i}", KnowledgeLabel.KNOWN, scope) for i in block])
                rows = block[-1] + 1
            rate = (rows - before) / (time.perf_counter() - started)
            first = seconds(lambda: log.search(["warm up"], K, scope))
            if hasattr(log, "wait"):  # until its graph is built
                print(f"{size:>9} rows: graph ready after {seconds(log.wait):.1f} s more")
            times = sorted(seconds(lambda: log.search(["a question"], K, scope)) for _ in range(QUERIES))
            medians[size] = statistics.median(times)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{size:>9} rows: insert {rate:,.0f}/s, first search (index follows) {first:.2f} s, "
                f"search p50 {medians[size] * 1e3:.1f} ms, p99 {times[-1] * 1e3:.1f} ms, peak memory {peak:.0f} MB"
            )
    return medians


def against_a_pass(medians: dict[int, float]) -> None:
    from knowgate.gates.dhicl import DhiclGate
    from knowgate.models import load_model
    from knowgate.retrieval.embeddings import SentenceEmbedder
    from knowgate.types import LabelPrompt, Neighbor, Question, Reading

    model, gate, embedder = load_model("smollm"), DhiclGate(), SentenceEmbedder()
    near = tuple(Neighbor(f"Who wrote the famous book with number {i}?", "known", 0.5) for i in range(20))
    reading = Reading(neighbors={"dhicl": near})
    prompts = [gate.build_label_prompts([Question(f"Who wrote Hamlet, part {i}?")], [reading])[0] for i in range(8)]
    bare = [LabelPrompt((prompt.prefix + prompt.parts[0], *prompt.parts[1:])) for prompt in prompts]
    model.label_logits(bare[:1], gate.labels), model.label_logits(prompts[:1], gate.labels)
    whole = statistics.median(seconds(lambda p=p: model.label_logits([p], gate.labels)) for p in bare)
    kept = statistics.median(seconds(lambda p=p: model.label_logits([p], gate.labels)) for p in prompts)
    embedder.embed(["warm up"])
    embedding = statistics.median(seconds(lambda: embedder.embed(["Who wrote Hamlet?"])) for _ in range(10))
    print(f"DH-ICL pass: {whole:.2f} s whole, {kept:.2f} s with the instruction kept: {whole / kept:.2f} x (aim > 1)")
    print(f"embedding one question: {embedding * 1e3:.0f} ms, {embedding / kept:.1%} of the pass")
    if 10**5 in medians:
        print(f"search at 10^5 rows: {medians[10**5] / kept:.1%} of a DH-ICL pass (aim <= 5 %)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=10**6)
    parser.add_argument("--history", help="a database to fill instead of a file; it must be empty")
    parser.add_argument("--no-model", action="store_true", help="the store alone")
    options = parser.parse_args()
    medians = store_speed(options.largest, options.history)
    if not options.no_model:
        against_a_pass(medians)


if __name__ == "__main__":
    main()
