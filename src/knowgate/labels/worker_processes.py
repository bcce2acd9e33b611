"""Worker processes that search passages and grade answers, so that this process only feeds the LLM.

Python runs one thread of a process at a time. Threads that search and grade therefore delay the thread that feeds a GPU.
A worker opens the index by its path. It reads requests as JSON lines on stdin, and ends when stdin is closed.
`multiprocessing` is not used, because its processes would run the user's script again.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from knowgate.labels.grading import Grade, StringGrader
from knowgate.labels.options import LabelPlan
from knowgate.labels.passages import PassageFinder, PassageSearchResults
from knowgate.retrieval.bm25 import Bm25Retriever
from knowgate.retrieval.index_folder import open_bm25
from knowgate.types import Passage, Question

MIN_QUESTIONS = 500  # starting a worker takes a second of processor time, which a shorter run does not save
MIN_CORES = 4
MAX_WORKERS = 4
# With -P, Python does not import modules from the current folder, which could shadow standard ones.
COMMAND = (sys.executable, "-P", "-m", "knowgate.labels.worker_processes")


def count_workers(finder: PassageFinder, n_questions: int) -> int:
    """Return how many workers a label run should have; 0 if threads of this process do as well.

    Workers search only BM25 indexes on disk. Other retrievers need a GPU or a server, or exist only in this process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    can_reopen = isinstance(finder.retriever, Bm25Retriever) and finder.retriever.folder is not None
    pays = n_questions >= MIN_QUESTIONS and cores >= MIN_CORES
    return min(MAX_WORKERS, cores // 2) if can_reopen and pays else 0


class WorkerProcesses:
    """Searches passages and grades answers in workers. The results equal those of this process.

    This process does the work itself until the workers are ready, and after one of them has failed. So errors are the
    same as without workers.

    Args:
        finder: Finds the passages. If there are workers, its retriever must be a BM25 index on disk.
        count: Number of workers; may be 0.
    """

    def __init__(self, finder: PassageFinder, count: int):
        self.is_ready = False
        self._finder, self._count = finder, count
        self._workers: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the workers in a thread, because opening an index can take seconds."""
        if self._count:
            threading.Thread(target=self._start, name="knowgate-workers", daemon=True).start()

    def close(self) -> None:
        """Kill the workers. This process does all further work itself."""
        self._count, self.is_ready = 0, False
        for worker in self._workers:
            worker.kill()  # a thread that waits for the worker then releases the lock
        with self._lock:
            for worker in self._workers:
                worker.communicate()  # closes the pipes

    def find(self, questions: Sequence[Question]) -> PassageSearchResults:
        """Find the passages of each question, and count how often its answer occurs."""
        results = self.run("search", [[question.text, question.answers] for question in questions])
        if results is None:
            return self._finder.find(questions)
        passages = [[Passage(*fields) for fields in passages] for passages, _ in results]
        return PassageSearchResults(passages, [frequency for _, frequency in results])

    def run(self, task: str, items: Sequence[Any]) -> list[Any] | None:
        """Divide the items of a task among the workers, and return one result per item; None if no worker is ready."""
        if not self.is_ready:
            return None
        try:
            with self._lock:
                size = -(-len(items) // len(self._workers)) or 1
                parts = [items[start : start + size] for start in range(0, len(items), size)]
                busy = self._workers[: len(parts)]
                for worker, part in zip(busy, parts, strict=True):
                    _send(worker, [task, part])
                return [result for worker in busy for result in _receive(worker)]
        except (OSError, ValueError):  # a worker failed
            self.close()
            return None

    def _start(self) -> None:
        """Start all workers, and wait until they have opened the index."""
        plan, retriever = self._finder.plan, self._finder.retriever
        assert isinstance(retriever, Bm25Retriever)
        index = [str(retriever.folder), retriever.fingerprint, plan.candidates if self._finder.reranker else plan.k]
        # Workers import from the same folders as this process. In a session of their own, Ctrl-C does not reach them.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            with self._lock:
                while len(self._workers) < self._count:
                    worker = subprocess.Popen(  # our own module, in this Python  # nosec B603
                        COMMAND,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        env=environment,
                        start_new_session=True,
                    )
                    self._workers.append(worker)
                    _send(worker, index)
                is_ready = all(_receive(worker) for worker in self._workers)
            self.is_ready = is_ready and self._count > 0
        except (OSError, ValueError):  # a worker could not start, or could not open the index
            self.close()


@dataclass(frozen=True)
class WorkerGrader(StringGrader):
    """Grades as `StringGrader` does, in worker processes."""

    workers: WorkerProcesses = field(kw_only=True)

    def grade(self, answers: Sequence[str], questions: Sequence[Question]) -> list[Grade]:
        """Grade answers. Answers to one question that follow each other are graded by the same worker."""
        groups = itertools.groupby(zip(answers, questions, strict=True), key=lambda pair: id(pair[1]))
        items = []
        for _, pairs in groups:
            texts, (question, *_) = zip(*pairs, strict=True)
            letter = question.meta.get("gold_letter")
            items.append([self.name, question.text, question.answers, question.choices, letter and str(letter), texts])
        grades = self.workers.run("grade", items)
        if grades is None:
            return super().grade(answers, questions)
        return [Grade(*fields) for row in grades for fields in row]


# --- in the worker --------------------------------------------------------------------------------


def main() -> None:
    """Work until stdin is closed. The first line names the index."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder, fingerprint, k = json.loads(sys.stdin.readline())
    retriever = open_bm25(folder)
    if retriever.fingerprint != fingerprint:
        sys.exit("the index has changed since this run began.")
    finder = PassageFinder(LabelPlan(k=k), retriever)
    _write(True)
    for line in sys.stdin:
        task, items = json.loads(line)
        _write(_search(finder, items) if task == "search" else [_grade(*item) for item in items])


def _search(finder: PassageFinder, items: list[Any]) -> list[Any]:
    """Return the fields of the passages, and the frequency of the answer, for each question and its gold answers."""
    results = finder.find([Question(text, answers=tuple(answers)) for text, answers in items])
    passages = [[astuple(passage) for passage in passages] for passages in results.passages]
    return list(zip(passages, results.frequencies, strict=True))


def _grade(
    name: Any, text: str, answers: list[str], choices: list[str], letter: str | None, texts: list[str]
) -> list[Any]:
    """Grade several answers to a question with the string grader of this name; return the fields of the grades."""
    question = Question(text, answers=tuple(answers), choices=tuple(choices), meta={"gold_letter": letter})
    return [astuple(grade) for grade in StringGrader(name).grade(texts, [question] * len(texts))]


def _write(result: Any) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def _send(worker: subprocess.Popen[bytes], request: Any) -> None:
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(request).encode() + b"\n")
    worker.stdin.flush()


def _receive(worker: subprocess.Popen[bytes]) -> Any:
    """Return the next result of a worker; raises ValueError if the worker has ended."""
    assert worker.stdout is not None
    return json.loads(worker.stdout.readline())


if __name__ == "__main__":
    main()
