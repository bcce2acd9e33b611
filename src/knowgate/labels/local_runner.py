"""Labels questions in this process: batches grow, passages are prefetched, and grading overlaps with generation.

A distributed runner implements the same protocol (`types.Runner`). It may run batches on any machine and repeat them.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

from knowgate.core import split_batches
from knowgate.errors import KnowgateError
from knowgate.labels.grading import StringGrader
from knowgate.labels.labeler import BatchFinisher, LabeledBatch, Labeler, PassageSearch
from knowgate.labels.passages import SearchResult
from knowgate.labels.worker_processes import WorkerGrader, WorkerProcesses, count_workers
from knowgate.types import Question, Result

PREFETCH_SIZE = 64  # questions per search (portion)
PREFETCH_BATCHES = 2  # how far the prefetcher runs ahead, in batches of the requested size
# Seconds after which a busy thread lets another one run Python; the default of 5 ms makes the thread that starts GPU
# kernels, which needs Python often but briefly, wait for the threads that search and grade.
SWITCH_INTERVAL = 0.0005


@dataclass(frozen=True)
class LocalRunner:
    """Runs batches in this process.

    Batches grow until one takes `seconds`. The first batch is small, so slow machines write rows soon.

    Attributes:
        first: Number of questions in the first batch.
        largest: Number of questions in the largest allowed batch.
        seconds: Target duration of a batch. A batch that takes at least this long is not followed by a larger one.
    """

    first: int = 4
    largest: int = 2_048
    seconds: float = 10.0

    def run(self, questions: Sequence[Question], work: Callable[[Sequence[Question]], Result]) -> Iterator[Result]:
        """Call `work` with one batch after another, and yield the results."""
        size = self.first
        n_done = 0
        while n_done < len(questions):
            batch = questions[n_done : n_done + size]
            started = time.perf_counter()
            yield work(batch)
            n_done += len(batch)
            size = self.next_size(size, time.perf_counter() - started)

    def next_size(self, size: int, duration: float) -> int:
        """Return the size of the next batch. It grows two- or fourfold if the last batch was faster than the target."""
        if duration >= self.seconds:
            return size
        factor = 4 if duration < self.seconds / 4 else 2
        return min(self.largest, size * factor)


class PassagePrefetcher:
    """Searches passages in a thread, before the LLM needs them.

    Questions are searched in portions, in the order of the run.

    Args:
        search_passages: Searches the passages of a batch of questions.
        questions: All questions of the run, in order.
    """

    def __init__(self, search_passages: PassageSearch, questions: Sequence[Question]):
        self._search_passages = search_passages
        self._portions = deque(split_batches(questions, PREFETCH_SIZE))
        self._thread = ThreadPoolExecutor(1, "knowgate-prefetch")
        # Maps the id of each question that was not requested yet to the search of its portion, which may still run.
        self._searches: dict[str, Future[dict[str, SearchResult]]] = {}

    def find(self, questions: Sequence[Question]) -> list[SearchResult]:
        """Return the passages of each question, and start searching for the next questions."""
        self._start_searches(len(questions))
        results: dict[str, SearchResult] = {}
        for question in questions:
            if question.id in self._searches:
                search = self._searches.pop(question.id)
                with contextlib.suppress(KnowgateError):  # the question is searched again below
                    results[question.id] = search.result()[question.id]
        missing = [question for question in questions if question.id not in results]
        if missing:
            results |= self._search(missing)
        return [results[question.id] for question in questions]

    def _start_searches(self, batch_size: int) -> None:
        """Start searching for the questions of this batch and the next ones."""
        n_ahead = max(PREFETCH_SIZE, PREFETCH_BATCHES * batch_size)  # questions to search in advance
        while self._portions and len(self._searches) < batch_size + n_ahead:
            portion = self._portions.popleft()
            search = self._thread.submit(self._search, portion)
            self._searches |= {question.id: search for question in portion}

    def _search(self, questions: Sequence[Question]) -> dict[str, SearchResult]:
        """Search the passages of questions, and return them by question id."""
        results = self._search_passages(questions)
        return {question.id: result for question, result in zip(questions, results, strict=True)}

    def close(self) -> None:
        """Cancel all searches that have not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class LabelingPipeline:
    """Labels batches without making the LLM wait.

    One thread searches passages in advance, another grades and writes answers. Use the pipeline in a `with` block, with
    batches in the order of `questions`.

    Args:
        labeler: The labeler.
        questions: All questions of the run, in order.
        write: Called with each finished batch, in order, in a thread of its own.
    """

    def __init__(self, labeler: Labeler, questions: Sequence[Question], write: Callable[[LabeledBatch], None]):
        finder = labeler.passage_finder
        self._workers = WorkerProcesses(finder, count_workers(finder, len(questions)))
        self._prefetcher = PassagePrefetcher(self._workers.find, questions) if finder.can_prefetch else None
        if self._workers.count and type(labeler.grader) is StringGrader:
            labeler = replace(labeler, grader=WorkerGrader(labeler.grader.name, workers=self._workers))
        self._labeler = replace(labeler, find_passages=self._prefetcher.find) if self._prefetcher else labeler
        self._write = write
        self._thread = ThreadPoolExecutor(1, "knowgate-write")
        # The batch that is being graded and written. The result is False if it could not be graded.
        self._last: tuple[Sequence[Question], Future[bool]] | None = None

    def __call__(self, questions: Sequence[Question]) -> int:
        """Let the LLM answer a batch, and return its size.

        Another thread grades and writes it while the LLM answers the next one.
        """
        finish = self._labeler.start(questions)  # returns a function that grades the answers
        self._wait_for_last()
        self._last = (questions, self._thread.submit(self._finish, finish))
        return len(questions)

    def __enter__(self) -> Self:
        """Let threads take turns more often, and start the worker processes."""
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL)
        gc.freeze()  # collecting garbage among the objects of all imported modules would stop the run for a second
        self._workers.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the last batch if there was no error, undo the settings of `__enter__`, and stop threads and workers."""
        try:
            if error is None:
                self._wait_for_last()
        finally:
            sys.setswitchinterval(self._switch_interval)
            gc.unfreeze()
            if self._prefetcher:
                self._prefetcher.close()
            self._thread.shutdown()
            self._workers.close()

    def _finish(self, finish: BatchFinisher) -> bool:
        """Grade a batch and write it. Runs in the thread.

        Returns:
            Whether the batch was written. False if it could not be graded.
        """
        try:
            batch = finish()
        except KnowgateError:
            return False
        self._write(batch)
        return True

    def _wait_for_last(self) -> None:
        """Wait until the thread has written the last batch. A batch with failed grading is labeled again here."""
        if self._last is None:
            return
        questions, finishing = self._last
        self._last = None
        is_written = finishing.result()
        if not is_written:
            self._write(self._labeler.label(questions))
