"""Worker processes that search passages and grade answers, so that this process only feeds the LLM.

Python runs one thread of a process at a time. Threads that search and grade therefore delay the thread that feeds a GPU.
A worker opens the index by its path. It reads requests as JSON lines on stdin, and ends when stdin is closed.
`multiprocessing` is not used, because its processes would run the user's script again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from itertools import groupby
from subprocess import DEVNULL, PIPE
from typing import Any

from knowgate.labels.grading import Grade, StringGrader
from knowgate.labels.options import LabelOptions
from knowgate.labels.passages import PassageFinder, SearchResult
from knowgate.retrieval.bm25 import Bm25Retriever
from knowgate.retrieval.index_folder import open_bm25
from knowgate.types import Passage, Question

MIN_QUESTIONS = 500  # starting a worker takes a second of processor time, which a shorter run does not save
MIN_CORES = 4
MAX_WORKERS = 4
# With -P, Python does not import modules from the current folder, which could shadow standard ones.
COMMAND = (sys.executable, "-P", "-m", "knowgate.labels.worker_processes")


def count_workers(finder: PassageFinder, n_questions: int) -> int:
    """Return how many worker processes a label run should have.

    0 if workers would save no time or cannot search the index.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    can_search = finder.can_prefetch and isinstance(finder.retriever, Bm25Retriever) and finder.retriever.folder
    if not can_search or n_questions < MIN_QUESTIONS or cores < MIN_CORES:
        return 0
    return min(MAX_WORKERS, cores // 2)


class WorkerProcesses:
    """Searches passages and grades answers in other processes (workers).

    This process does the work itself until the workers are ready, and after a failure.

    Args:
        finder: Finds the passages. If there are workers, its retriever must be a BM25 index on disk.
        count: Number of workers; may be 0.
    """

    def __init__(self, finder: PassageFinder, count: int):
        self.count = count
        self.is_ready = False
        self._finder = finder
        self._lock = threading.RLock()
        self._workers: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Start the workers in a thread. Opening an index can take seconds."""
        if self.count:
            threading.Thread(target=self._start, name="knowgate-workers", daemon=True).start()

    def close(self) -> None:
        """Kill the workers. This process does all further work itself."""
        self.count = 0
        self.is_ready = False
        for worker in self._workers:
            worker.kill()  # a thread that waits for the worker then releases the lock
        with self._lock:
            for worker in self._workers:
                worker.communicate()  # closes the pipes

    def find(self, questions: Sequence[Question]) -> list[SearchResult]:
        """Find the passages of each question, and count how often its answer occurs."""
        results = self.run("search", [[question.text, question.answers] for question in questions])
        if results is None:
            return self._finder.find(questions)
        return [SearchResult([Passage(*fields) for fields in passages], frequency) for passages, frequency in results]

    def run(self, task: str, items: Sequence[Any]) -> list[Any] | None:
        """Divide the items of a task among the workers, and return one result per item.

        None if the workers cannot be used.

        Args:
            task: "search" or "grade".
            items: The items, as JSON values.
        """
        if not self.is_ready or not items:
            return None
        size = math.ceil(len(items) / len(self._workers))  # items per worker
        requests = [[task, items[start : start + size]] for start in range(0, len(items), size)]
        replies = self._request(requests)
        return None if replies is None else [result for reply in replies for result in reply]

    def _request(self, requests: Sequence[Any]) -> list[Any] | None:
        """Send each request to a worker of its own, and return the replies. None if a worker failed.

        Args:
            requests: The requests, at most one per worker.
        """
        with self._lock:
            workers = self._workers[: len(requests)]
            try:
                for worker, request in zip(workers, requests, strict=True):
                    _write_line(worker.stdin, request)
                return [json.loads(worker.stdout.readline()) for worker in workers if worker.stdout]
            except (OSError, ValueError):  # the pipe of a worker that has ended
                self.close()
                return None
            except BaseException:  # Ctrl-C: the unread replies would otherwise be read as replies to the next requests
                self.close()
                raise

    def _start(self) -> None:
        """Start all workers, and wait until they have opened the index."""
        finder, retriever = self._finder, self._finder.retriever
        assert isinstance(retriever, Bm25Retriever)
        # If no Python process can be started, this process does the work itself.
        with self._lock, contextlib.suppress(OSError):
            while len(self._workers) < self.count:
                self._workers.append(_start_process())
        k = finder.options.candidates if finder.reranker else finder.options.k
        first_request = [str(retriever.folder), retriever.fingerprint, k]
        replies = self._request([first_request] * len(self._workers))
        self.is_ready = bool(replies) and self.count > 0  # the count is 0 if `close` was called meanwhile


def _start_process() -> subprocess.Popen[str]:
    """Start a worker process. Ctrl-C does not reach its session."""
    # Workers import from the same folders as this process.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options: dict[str, Any] = {"env": environment, "start_new_session": True, "text": True, "stderr": DEVNULL}
    return subprocess.Popen(COMMAND, stdin=PIPE, stdout=PIPE, **options)  # nosec B603


@dataclass(frozen=True)
class WorkerGrader(StringGrader):
    """Grader like `StringGrader`, but in worker processes."""

    workers: WorkerProcesses = field(kw_only=True)

    def grade(self, answers: Sequence[str], questions: Sequence[Question]) -> list[Grade]:
        """Grade each answer to the question at the same position.

        Neighboring answers to one question are sent together.
        """
        items: list[list[Any]] = []
        # Neighboring answers to one question share the same Question object.
        for _, neighbors in groupby(zip(answers, questions, strict=True), key=lambda pair: id(pair[1])):
            pairs = list(neighbors)
            texts = [answer for answer, _ in pairs]
            question = pairs[0][1]
            letter = str(question.meta.get("gold_letter") or "")
            items.append([self.name, question.text, question.answers, question.choices, letter, texts])
        grades = self.workers.run("grade", items)
        if grades is None:  # the workers cannot be used, so this process grades
            return super().grade(answers, questions)
        return [Grade(*fields) for row in grades for fields in row]


# --- in the worker --------------------------------------------------------------------------------


def main() -> None:
    """Run a worker: answer the requests on stdin. The first line names the index."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder, fingerprint, k = json.loads(sys.stdin.readline())
    retriever = open_bm25(folder)
    if retriever.fingerprint != fingerprint:
        sys.exit("the index has changed since this run began.")
    finder = PassageFinder(LabelOptions(k=k), retriever)
    _write_line(sys.stdout, "ready")
    for line in sys.stdin:
        task, items = json.loads(line)
        reply = _search(finder, items) if task == "search" else [_grade(*item) for item in items]
        _write_line(sys.stdout, reply)


def _search(finder: PassageFinder, items: list[Any]) -> list[Any]:
    """Find the passages of questions, and count how often their answers occur in the corpus.

    Args:
        finder: Searches the index.
        items: The text and the gold answers of each question.

    Returns:
        For each question, a list of passages (each a list of its fields) and the count; None if it was not counted.
    """
    results = finder.find([Question(text, answers=tuple(answers)) for text, answers in items])
    return [[list(map(astuple, result.passages)), result.frequency] for result in results]


def _grade(grader: Any, text: str, golds: list[str], choices: list[str], letter: str, answers: list[str]) -> list[Any]:
    """Grade several answers to a question, and return the fields of the grades.

    Args:
        grader: Name of the grader.
        text: The question.
        golds: Its gold answers.
        choices: Its choices.
        letter: Letter of the right choice.
        answers: The answers to grade.
    """
    question = Question(text, answers=tuple(golds), choices=tuple(choices), meta={"gold_letter": letter})
    return [astuple(grade) for grade in StringGrader(grader).grade(answers, [question] * len(answers))]


def _write_line(stream: Any, value: Any) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
