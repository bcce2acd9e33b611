"""A million of everything: how long it takes, and how much memory, each part in a process of its own.

    python benchmarks/scale.py [--rows 1000000] [--parts history,again,index,search,eval,ask]

history: a log is filled and searched while lists of near questions are made beside it, then from them; `again` opens
it anew, as the next process does. index: BM25 over made-up passages, which `search` opens. eval: ten gates on a
recorded run. ask: lines from standard input with the fake model. Vectors are drawn around topics, as those of questions
are, at a cosine of about .6 to their topic; recall is that of the 20 nearest.
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

WIDTH, K, QUERIES = 384, 20, 300
GATES = "logprob:first,logprob:mean,logprob:min,logprob:margin,logprob:entropy,flare,prompt,always,never,random"


class TopicEmbedder:
    """A unit vector per text, near one of a few thousand topics; the same for the same text."""

    fingerprint = "topics"

    def __init__(self, topics: int = 4_000):
        self._topics = np.random.default_rng(0).standard_normal((topics, WIDTH)).astype(np.float32)
        self._topics /= np.linalg.norm(self._topics, axis=1, keepdims=True)

    def embed(self, texts: Any) -> Any:
        dice = np.random.default_rng([zlib.crc32(texts[0].encode()), len(texts)])
        noise = dice.standard_normal((len(texts), WIDTH)).astype(np.float32) * (1.33 / WIDTH**0.5)
        vectors = self._topics[dice.integers(0, len(self._topics), len(texts))] + noise
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def seconds(work: Callable[[], Any]) -> float:
    return measured(work)[0]


def measured(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and seconds of processor time: those that another machine's other work does not lengthen."""
    start, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - used


def spread(times: list[tuple[float, float]]) -> str:
    (p50, cpu50), (p99, cpu99) = np.quantile(times, [0.5, 0.99], axis=0) * 1e3
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms (processor time {cpu50:.1f} and {cpu99:.1f})"


def peak() -> str:
    return f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"


# --- the log ----------------------------------------------------------------------------------


def history(rows: int, folder: Path) -> None:
    from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry
    from knowgate.data.history.sqlite_store import SqliteHistory

    scope, log = HistoryScope("m", "p"), SqliteHistory(folder / "log.db", TopicEmbedder())
    start, there = time.perf_counter(), log.count(scope)  # from an earlier start with --in
    for first in range(there, rows, 5_000):
        block = range(first, min(first + 5_000, rows))
        log.add([LogEntry(f"question number {i}", KnowledgeLabel.KNOWN, scope) for i in block])
    filled = (rows - there) / (time.perf_counter() - start)
    print(f"history, {rows:,} entries: filled at {filled:,.0f}/s, {peak()}", flush=True)
    first_search = seconds(lambda: log.search(["warm up"], K, scope))
    before = [measured(lambda i=i: log.search([f"while {i}"], K, scope)) for i in range(10)]
    index, start = log._indexes[scope].index, time.perf_counter()
    index.wait()
    made = time.perf_counter() - start
    print(f"  first search {first_search:.1f} s, exact meanwhile {spread(before)}; lists after {made:.0f} s more")
    searched(log, scope)


def again(rows: int, folder: Path) -> None:
    from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry
    from knowgate.data.history.sqlite_store import SqliteHistory

    scope, log = HistoryScope("m", "p"), SqliteHistory(folder / "log.db", TopicEmbedder())
    print(
        f"history opened again, {rows:,} entries: first search {seconds(lambda: log.search(['first'], K, scope)):.2f} s"
    )
    searched(log, scope)
    log.add([LogEntry(f"a later question {i}", KnowledgeLabel.KNOWN, scope) for i in range(1_000)])
    print(f"  search after 1,000 more entries {seconds(lambda: log.search(['and now'], K, scope)) * 1e3:.1f} ms")


def searched(log: Any, scope: Any) -> None:
    """What a search costs, and how much of the exact neighbours it finds."""
    times = [measured(lambda i=i: log.search([f"question {i}"], K, scope)) for i in range(QUERIES)]
    used = peak()
    index = log._indexes[scope].index
    if index._ann is None:
        print(f"  search {spread(times)} (exact), {used}", flush=True)
        return
    from knowgate.data.history.vector_index import _extract_rows

    ids, vectors = _extract_rows(index._ann.index)
    shares = []
    for i in range(50):
        query = log.embed([f"asked {i}"])
        best = set(ids[np.argpartition(-(vectors @ query[0]), K)[:K]].tolist())
        shares.append(len(best & {number for number, _ in index.nearest(query, K)[0]}) / K)
    print(f"  search {spread(times)} (aim < 10 and < 30), recall {np.mean(shares):.3f}, {used} (aim < 2.5)", flush=True)


# --- an index ---------------------------------------------------------------------------------


def index(rows: int, folder: Path) -> None:
    import random

    from benchmarks.outside import words
    from knowgate.retrieval.index import build_index

    dice, corpus = random.Random(0), folder / f"corpus-{rows}.jsonl"
    if not corpus.exists():  # from an earlier start with --in
        with corpus.open("w", encoding="utf-8") as file:
            for i in range(rows):
                file.write(json.dumps({"id": str(i), "text": " ".join(words(dice, 40))}) + "\n")
    built, used = measured(lambda: build_index(corpus, folder / "index"))
    print(
        f"index, {rows:,} passages of 40 words: built in {built:.0f} s (processor time {used:.0f}), {peak()}",
        flush=True,
    )


def search(rows: int, folder: Path) -> None:
    """The index of the part before, opened by another process."""
    import random

    from benchmarks.outside import words
    from knowgate.retrieval import load_retriever

    start, dice = time.perf_counter(), random.Random(1)
    found = load_retriever(str(folder / "index"))
    found.search(["warm up"], 1)
    print(f"index of {rows:,} passages opened in {time.perf_counter() - start:.1f} s, {peak()}")
    asked = [" ".join(words(dice, 8)) for _ in range(QUERIES)]
    print(f"  BM25 {spread([measured(lambda q=q: found.search([q], 3)) for q in asked])} (aim p50 < 30), {peak()}")


# --- a recorded run ---------------------------------------------------------------------------


def evaluate(rows: int, folder: Path) -> None:
    """The whole command, page and all, on a tenth of the rows and on all of them."""
    for n in (max(1, rows // 10), rows):
        run = folder / f"run-{n}"
        if not run.exists():  # from an earlier start with --in
            record(n, run)
        command = [sys.executable, "-m", "knowgate", "eval", "--labels", str(run), "--gates", GATES]
        start = time.perf_counter()
        with subprocess.Popen([*command, "--out", str(folder / "report"), "--json"], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            found = json.load(child.stdout)
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0, "the command failed"
        assert found["questions"] == n, found["questions"]
        took, gates, cpu = time.perf_counter() - start, len(GATES.split(",")), used.ru_utime + used.ru_stime
        print(
            f"eval, {n:,} recorded rows x {gates} gates: {took:.0f} s (processor time {cpu:.0f}), "
            f"{cpu / n * 1e6:.0f} us a row, peak memory {used.ru_maxrss / 2**10:.0f} MiB",
            flush=True,
        )


def record(rows: int, path: Path) -> None:
    """A run of 1,000 questions told a thousand times, every time with another question and other numbers."""
    import random

    from knowgate.labels.labeling import label
    from knowgate.models.fake import FakeModel
    from knowgate.types import Passage, Question

    shown = (Passage("p", "It is here."),)
    asked = [Question(f"Where is {i}?", id=str(i), answers=("here",), contexts=shown) for i in range(1_000)]
    seed = label(asked, model=FakeModel(), out=path, samples=10, layers="none")
    told = [json.loads(line) for line in (path / seed.rows_name).read_text(encoding="utf-8").splitlines()]
    dice = random.Random(0)
    with (path / seed.rows_name).open("w", encoding="utf-8") as file:
        for i in range(rows):
            row = told[i % len(told)] | {"id": str(i), "question": f"Where is {i}?"}
            surety = dice.random()
            tokens = [[text, round(-3 * surety * dice.random(), 6), round(2 * surety, 6), round(1 - surety, 6)]
                      for text, *_ in row["closed"]["tokens"]]  # fmt: skip
            row["closed"] = row["closed"] | {"tokens": tokens, "correct": dice.random() > surety}
            row["open"] = row["open"] | {"correct": dice.random() < 0.6}
            row["signals"] = {"self_assessment": round(6 * surety - 3 + dice.gauss(0, 1), 6)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


# --- asking -----------------------------------------------------------------------------------


def ask(rows: int, folder: Path) -> None:
    """Peak memory of a tenth of the lines, and of all: equal where memory is flat."""
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
            _, _, used = os.wait4(child.pid, 0)
            child.returncode = 0
        rate = n / (time.perf_counter() - start)
        print(
            f"ask, {n:,} lines: {answers:,} answers, {rate:,.0f}/s, peak memory {used.ru_maxrss / 2**10:.0f} MiB",
            flush=True,
        )


def _feed(pipe: Any, lines: Iterator[bytes]) -> None:
    import threading

    def write() -> None:
        with pipe:
            for line in lines:
                pipe.write(line)

    threading.Thread(target=write, daemon=True).start()


PARTS: dict[str, Callable[[int, Path], None]] = {
    "history": history,
    "again": again,
    "index": index,
    "search": search,
    "eval": evaluate,
    "ask": ask,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--in", dest="folder", default="", help="a folder to work in that stays; else a temporary one")
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    if options.here:
        PARTS[options.parts](options.rows, Path(options.folder))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or scratch
        Path(folder).mkdir(parents=True, exist_ok=True)
        for part in options.parts.split(","):
            rest = ["--here", "--parts", part, "--rows", str(options.rows), "--in", folder]
            subprocess.run([sys.executable, __file__, *rest], check=True)


if __name__ == "__main__":
    main()
