"""Measure time and memory with a million rows, each part in a separate process.

    python benchmarks/scale.py [--rows 1000000] [--parts history,again,index,search,eval,ask]

The parts are:

    history  fill a history log, and search it while its approximate index is built, and again afterwards
    again    open the same log in a new process, and search it
    index    build a BM25 index over generated passages
    search   open that index in a new process, and search it
    eval     evaluate ten gates on a recorded run
    ask      answer lines from standard input with the fake model

Embeddings are drawn around topics, at a cosine of about .6 to their topic, as those of real questions are. Recall is that
of the 20 nearest neighbors.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

WIDTH, K, QUERIES = 384, 20, 300
GATES = "logprob:first,logprob:mean,logprob:min,logprob:margin,logprob:entropy,flare,prompt,always,never,random"


class TopicEmbedder:
    """Embedder that returns a random unit vector near one of a few thousand topics for each text.

    The first text and the number of texts seed a batch, so the same batch gets the same vectors.
    """

    fingerprint = "topics"

    def __init__(self, topics: int = 4_000):
        self._topics = np.random.default_rng(0).standard_normal((topics, WIDTH)).astype(np.float32)
        self._topics /= np.linalg.norm(self._topics, axis=1, keepdims=True)

    def embed(self, texts: Any) -> Any:
        """Return one vector per text."""
        rng = np.random.default_rng([zlib.crc32(texts[0].encode()), len(texts)])
        noise = rng.standard_normal((len(texts), WIDTH)).astype(np.float32) * (1.33 / WIDTH**0.5)
        vectors = self._topics[rng.integers(0, len(self._topics), len(texts))] + noise
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def measure_seconds(function: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    return measure_times(function)[0]


def measure_times(function: Callable[[], Any]) -> tuple[float, float]:
    """Return the wall-clock and CPU seconds of a call. Other work on the machine hardly changes the CPU seconds."""
    start, cpu_start = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - start, time.process_time() - cpu_start


def format_latency(times: list[tuple[float, float]]) -> str:
    """Format the median and the 99th percentile of wall-clock and CPU times."""
    (p50, cpu50), (p99, cpu99) = np.quantile(times, [0.5, 0.99], axis=0) * 1e3
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms (CPU time {cpu50:.1f} and {cpu99:.1f})"


def format_peak_memory() -> str:
    """Format the peak memory of this process."""
    return f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"


# --- history log ------------------------------------------------------------------------------


def measure_history(rows: int, folder: Path) -> None:
    """Fill a history log, and search it before and after its approximate index is built."""
    from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry
    from knowgate.data.history.sqlite_store import SqliteHistory

    scope, log = HistoryScope("m", "p"), SqliteHistory(folder / "log.db", TopicEmbedder())
    start, existing = time.perf_counter(), log.count(scope)  # A folder given with --in may already have entries.
    for first in range(existing, rows, 5_000):
        block = range(first, min(first + 5_000, rows))
        log.add([LogEntry(f"question number {i}", KnowledgeLabel.KNOWN, scope) for i in block])
    insert_rate = (rows - existing) / (time.perf_counter() - start)
    print(f"history, {rows:,} entries: filled at {insert_rate:,.0f}/s, {format_peak_memory()}", flush=True)
    first_search = measure_seconds(lambda: log.search(["warm up"], K, scope))
    exact_times = [measure_times(lambda i=i: log.search([f"while {i}"], K, scope)) for i in range(10)]
    index, start = log._indexes[scope], time.perf_counter()
    index.wait()
    build_seconds = time.perf_counter() - start
    print(
        f"  first search {first_search:.1f} s, exact search until the index is built {format_latency(exact_times)}; "
        f"index ready after {build_seconds:.0f} s more"
    )
    measure_history_search(log, scope)


def measure_reopened_history(rows: int, folder: Path) -> None:
    """Open the history log that `measure_history` filled, search it, and search again after new entries."""
    from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry
    from knowgate.data.history.sqlite_store import SqliteHistory

    scope, log = HistoryScope("m", "p"), SqliteHistory(folder / "log.db", TopicEmbedder())
    first_search = measure_seconds(lambda: log.search(["first"], K, scope))
    print(f"history opened again, {rows:,} entries: first search {first_search:.2f} s")
    measure_history_search(log, scope)
    log.add([LogEntry(f"a later question {i}", KnowledgeLabel.KNOWN, scope) for i in range(1_000)])
    next_search = measure_seconds(lambda: log.search(["and now"], K, scope))
    print(f"  search after 1,000 more entries {next_search * 1e3:.1f} ms")


def measure_history_search(log: Any, scope: Any) -> None:
    """Print the latency of a search, and its recall compared with exact search."""
    times = [measure_times(lambda i=i: log.search([f"question {i}"], K, scope)) for i in range(QUERIES)]
    memory = format_peak_memory()
    index = log._indexes[scope]
    if index._ann is None:
        print(f"  search {format_latency(times)} (exact), {memory}", flush=True)
        return
    ids, vectors = extract_rows(index._ann.index)
    recalls = []
    for i in range(50):
        query = log.embed([f"asked {i}"])
        nearest = set(ids[np.argpartition(-(vectors @ query[0]), K)[:K]].tolist())
        recalls.append(len(nearest & {number for number, _ in index.nearest(query, K)[0]}) / K)
    print(
        f"  search {format_latency(times)} (target < 10 and < 30), recall {np.mean(recalls):.3f}, "
        f"{memory} (target < 2.5)",
        flush=True,
    )


def extract_rows(index: Any) -> tuple[Any, Any]:
    """Read the ids and vectors of all rows of a faiss index, which stores them in lists of similar rows."""
    from faiss.contrib.inspect_tools import get_invlist

    lists = [get_invlist(index.invlists, number) for number in range(index.nlist)]
    vectors = [codes.reshape(len(ids), -1).view(np.float32) for ids, codes in lists if len(ids)]
    return np.concatenate([ids for ids, _ in lists]), np.concatenate(vectors)


# --- BM25 index -------------------------------------------------------------------------------


def measure_index(rows: int, folder: Path) -> None:
    """Build a BM25 index over generated passages."""
    import random

    from benchmarks.outside import draw_words
    from knowgate.retrieval.index import build_index

    rng, corpus = random.Random(0), folder / f"corpus-{rows}.jsonl"
    if not corpus.exists():  # A folder given with --in may already have it.
        with corpus.open("w", encoding="utf-8") as file:
            for i in range(rows):
                file.write(json.dumps({"id": str(i), "text": " ".join(draw_words(rng, 40))}) + "\n")
    build_seconds, cpu = measure_times(lambda: build_index(corpus, folder / "index"))
    print(
        f"index, {rows:,} passages of 40 words: built in {build_seconds:.0f} s (CPU time {cpu:.0f}), "
        f"{format_peak_memory()}",
        flush=True,
    )


def measure_index_search(rows: int, folder: Path) -> None:
    """Open the index that `measure_index` built, and search it."""
    import random

    from benchmarks.outside import draw_words
    from knowgate.retrieval import load_retriever

    start, rng = time.perf_counter(), random.Random(1)
    retriever = load_retriever(str(folder / "index"))
    retriever.search(["warm up"], 1)
    print(f"index of {rows:,} passages opened in {time.perf_counter() - start:.1f} s, {format_peak_memory()}")
    queries = [" ".join(draw_words(rng, 8)) for _ in range(QUERIES)]
    times = [measure_times(lambda query=query: retriever.search([query], 3)) for query in queries]
    print(f"  BM25 {format_latency(times)} (target p50 < 30), {format_peak_memory()}")


# --- evaluation -------------------------------------------------------------------------------


def measure_evaluation(rows: int, folder: Path) -> None:
    """Run `knowgate eval` with its report on a tenth of the rows and on all of them."""
    for n in (max(1, rows // 10), rows):
        run = folder / f"run-{n}"
        if not run.exists():  # A folder given with --in may already have it.
            write_run(n, run)
        command = [sys.executable, "-m", "knowgate", "eval", "--labels", str(run), "--gates", GATES]
        start = time.perf_counter()
        with subprocess.Popen([*command, "--out", str(folder / "report"), "--json"], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            report = json.load(child.stdout)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0, "the command failed"
        assert report["questions"] == n, report["questions"]
        elapsed, gates, cpu = time.perf_counter() - start, len(GATES.split(",")), usage.ru_utime + usage.ru_stime
        print(
            f"eval, {n:,} recorded rows x {gates} gates: {elapsed:.0f} s (CPU time {cpu:.0f}), "
            f"{cpu / n * 1e6:.0f} us per row, peak memory {usage.ru_maxrss / 2**10:.0f} MiB",
            flush=True,
        )


def write_run(rows: int, path: Path) -> None:
    """Write a label run: label 1,000 questions, and repeat their rows with new questions and random signals."""
    import random

    from knowgate.labels.labeling import label
    from knowgate.models.fake import FakeModel
    from knowgate.types import Passage, Question

    contexts = (Passage("p", "It is here."),)
    questions = [Question(f"Where is {i}?", id=str(i), answers=("here",), contexts=contexts) for i in range(1_000)]
    run = label(questions, model=FakeModel(), out=path, samples=10, layers="none")
    labeled = [json.loads(line) for line in (path / run.rows_name).read_text(encoding="utf-8").splitlines()]
    rng = random.Random(0)
    with (path / run.rows_name).open("w", encoding="utf-8") as file:
        for i in range(rows):
            row = labeled[i % len(labeled)] | {"id": str(i), "question": f"Where is {i}?"}
            uncertainty = rng.random()
            tokens = [
                [text, round(-3 * uncertainty * rng.random(), 6), round(2 * uncertainty, 6), round(1 - uncertainty, 6)]
                for text, *_ in row["closed"]["tokens"]
            ]
            row["closed"] = row["closed"] | {"tokens": tokens, "correct": rng.random() > uncertainty}
            row["open"] = row["open"] | {"correct": rng.random() < 0.6}
            row["signals"] = {"self_assessment": round(6 * uncertainty - 3 + rng.gauss(0, 1), 6)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


# --- answers ----------------------------------------------------------------------------------


def measure_answers(rows: int, folder: Path) -> None:
    """Run `knowgate ask` on a tenth of the lines and on all of them. Equal peak memory means that memory is constant."""
    for n in (max(1, rows // 10), rows):
        start = time.perf_counter()
        command = [sys.executable, "-m", "knowgate", "ask", "--model", "fake", "--gate", "never", "--json"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            _feed(child.stdin, (f"Where is number {i}?\n".encode() for i in range(n)))
            answers = sum(1 for _ in child.stdout)
            _, _, usage = os.wait4(child.pid, 0)
            child.returncode = 0
        rate = n / (time.perf_counter() - start)
        print(
            f"ask, {n:,} lines: {answers:,} answers, {rate:,.0f}/s, peak memory {usage.ru_maxrss / 2**10:.0f} MiB",
            flush=True,
        )


def _feed(pipe: Any, lines: Iterator[bytes]) -> None:
    """Write lines to a pipe in a thread, and close it."""
    import threading

    def write() -> None:
        with pipe:
            for line in lines:
                pipe.write(line)

    threading.Thread(target=write, daemon=True).start()


PARTS: dict[str, Callable[[int, Path], None]] = {
    "history": measure_history,
    "again": measure_reopened_history,
    "index": measure_index,
    "search": measure_index_search,
    "eval": measure_evaluation,
    "ask": measure_answers,
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10**6, help="number of rows")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to measure, separated by commas")
    parser.add_argument(
        "--in", dest="folder", default="", help="folder to work in and keep; default: a temporary folder"
    )
    parser.add_argument("--here", action="store_true", help="run one part in this process")
    options = parser.parse_args()
    if options.here:
        PARTS[options.parts](options.rows, Path(options.folder))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or scratch
        Path(folder).mkdir(parents=True, exist_ok=True)
        for part in options.parts.split(","):
            arguments = ["--here", "--parts", part, "--rows", str(options.rows), "--in", folder]
            subprocess.run([sys.executable, __file__, *arguments], check=True)


if __name__ == "__main__":
    main()
