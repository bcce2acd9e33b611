"""Labels questions in this process: batches grow, passages are prefetched, and grading overlaps with generation.

A distributed runner implements the same protocol (`types.Runner`). It may run batches on any machine and repeat them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

from knowgate.errors import KnowgateError
from knowgate.labels.grading import StringGrader
from knowgate.labels.labeler import BatchFinisher, LabeledBatch, Labeler, PassageSearch
from knowgate.labels.passages import PassageSearchResults
from knowgate.labels.worker_processes import WorkerGrader, WorkerProcesses, count_workers
from knowgate.types import Passage, Question, Result

PREFETCH_SIZE = 64  # questions per search
PREFETCH_BATCHES = 2  # how far the prefetcher runs ahead, in batches of the last requested size
STOP_TIMEOUT = 5.0  # seconds to wait at the end for a running search
MAX_PENDING_BATCHES = 1  # batches that may wait for grading and writing while the LLM continues
# Seconds after which a busy thread lets another one run Python; the default of 5 ms makes the thread that starts GPU
# kernels, which needs Python often but briefly, wait for the threads that search and grade.
SWITCH_INTERVAL = 0.0005
QuestionPassages = tuple[list[Passage], int | None]


@dataclass(frozen=True)
class LocalRunner:
    """Runs batches in this process and makes them larger until a batch takes `seconds`.

    A GPU takes as long for four questions as for hundreds, so the batch size doubles after a fast batch and grows
    fourfold after a very fast one. A slow machine writes its first rows soon, and a fast machine stays busy.

    Attributes:
        first: Number of questions in the first batch.
        largest: Maximum number of questions in a batch.
        seconds: Target duration of a batch. A batch that takes at least this long is not followed by a larger one.
    """

    first: int = 4
    largest: int = 2_048
    seconds: float = 10.0

    def run(self, questions: Sequence[Question], work: Callable[[Sequence[Question]], Result]) -> Iterator[Result]:
        """Call `work` with one batch after another, in the order of the questions, and yield its results."""
        size, n_done = self.first, 0
        while n_done < len(questions):
            batch = questions[n_done : n_done + size]
            started = time.perf_counter()
            yield work(batch)
            n_done += len(batch)
            size = self.next_size(size, time.perf_counter() - started)

    def next_size(self, size: int, duration: float) -> int:
        """Return the size of the next batch, given the size and duration of the last one.

        The size stays the same if the last batch took the target duration or longer. Otherwise it doubles, or grows
        fourfold if the last batch took less than a quarter of the target.
        """
        if duration >= self.seconds:
            return size
        factor = 4 if duration < self.seconds / 4 else 2
        return min(self.largest, size * factor)


class PassagePrefetcher:
    """Searches the passages of questions in a thread, before the LLM needs them.

    Questions are searched in the order of the run. A question that is requested in another order, or after prefetching
    has failed, is searched when it is requested.

    Args:
        find: Searches the passages of a batch of questions.
        questions: All questions of the run, in order.
    """

    def __init__(self, find: PassageSearch, questions: Sequence[Question]):
        self._find = find
        self._questions = questions
        self._results: dict[str, QuestionPassages] = {}
        self._pending = {question.id for question in questions}  # ids that are not searched yet
        self._max_results = PREFETCH_SIZE
        self._is_awaited = False  # whether `find` is waiting, so that the limit of stored results does not apply
        self._is_stopped = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._prefetch, name="knowgate-prefetch", daemon=True)

    def start(self) -> None:
        """Start the prefetching thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop prefetching. Waits up to `STOP_TIMEOUT` seconds for a running search."""
        with self._change:
            self._is_stopped = True
            self._change.notify_all()
        self._thread.join(STOP_TIMEOUT)

    def find(self, questions: Sequence[Question]) -> PassageSearchResults:
        """Return the passages of questions, which another thread searches in advance. Waits for them if necessary.

        If that thread has stopped, questions without a result are searched now.
        """
        ids = [question.id for question in questions]
        with self._change:
            self._max_results = max(PREFETCH_SIZE, PREFETCH_BATCHES * len(questions))
            self._is_awaited = True
            self._change.notify_all()
            self._change.wait_for(lambda: self._is_stopped or self._pending.isdisjoint(ids))
            self._is_awaited = False
            results = {key: self._results.pop(key) for key in ids if key in self._results}
            self._change.notify_all()
        missing = [question for question in questions if question.id not in results]
        if missing:
            results |= _group_by_id(missing, self._find(missing))
        pairs = [results[key] for key in ids]
        return PassageSearchResults([passages for passages, _ in pairs], [frequency for _, frequency in pairs])

    def _prefetch(self) -> None:
        """Search the passages of all questions in order, and store them for `find`. Runs in the thread.

        If a search fails, the thread stops. `find` then searches the remaining questions, and raises the error.
        """
        try:
            for start in range(0, len(self._questions), PREFETCH_SIZE):
                if not self._wait_for_room():
                    return
                batch = self._questions[start : start + PREFETCH_SIZE]
                self._store(_group_by_id(batch, self._find(batch)))
        except KnowgateError:
            pass
        finally:
            with self._change:
                self._is_stopped = True
                self._change.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait until more results may be stored; returns False if the prefetcher was stopped."""
        with self._change:
            self._change.wait_for(
                lambda: self._is_stopped or self._is_awaited or len(self._results) < self._max_results
            )
            return not self._is_stopped

    def _store(self, results: dict[str, QuestionPassages]) -> None:
        """Store the results of searched questions, by question id, and wake up `find` if it waits for them."""
        with self._change:
            self._results |= results
            self._pending -= results.keys()
            self._change.notify_all()


def _group_by_id(questions: Sequence[Question], results: PassageSearchResults) -> dict[str, QuestionPassages]:
    """Return the search results of each question, by question id.

    They are its passages, and the number of passages in the corpus that contain its gold answer (None: unknown).
    """
    ids = [question.id for question in questions]
    pairs = zip(results.passages, results.frequencies, strict=True)
    return dict(zip(ids, pairs, strict=True))


class LabelingPipeline:
    """Labels batches so that the LLM does not wait for other work.

    One thread searches passages before the LLM needs them. Another thread grades and writes the answers afterwards. In
    long runs, these threads let worker processes search and grade. Use the pipeline in a `with` block, and call it with
    the batches of a run in the order of `questions`. Batches that the LLM has answered are written even if the next batch
    fails or is interrupted.

    Args:
        labeler: The labeler.
        questions: All questions of the run, in order.
        write: Called with each finished batch, in order, in a thread of its own.
    """

    def __init__(self, labeler: Labeler, questions: Sequence[Question], write: Callable[[LabeledBatch], None]):
        finder = labeler.passage_finder
        self._workers = WorkerProcesses(finder, count_workers(finder, len(questions)))
        self._prefetcher = PassagePrefetcher(self._workers.find, questions) if _can_prefetch(labeler) else None
        if self._workers.count and type(labeler.grader) is StringGrader:
            labeler = replace(labeler, grader=WorkerGrader(labeler.grader.name, workers=self._workers))
        self._labeler = replace(labeler, find_passages=self._prefetcher.find) if self._prefetcher else labeler
        self._write = write
        self._has_failed = False  # whether writing failed
        self._thread = ThreadPoolExecutor(1, "knowgate-write")
        # Batches that are being graded and written; the result of each is the error if it could not be graded.
        self._pending: deque[tuple[Sequence[Question], Future[KnowgateError | None]]] = deque()

    def __call__(self, questions: Sequence[Question]) -> int:
        """Let the LLM answer a batch, and return its size. Another thread grades the answers and writes the rows.

        If too many batches wait to be graded and written, this waits for the oldest.
        """
        finish = self._labeler.start(questions)
        self._pending.append((questions, self._thread.submit(self._finish, finish)))
        self._wait(MAX_PENDING_BATCHES)
        return len(questions)

    def __enter__(self) -> Self:
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._workers.start()
        if self._prefetcher:
            self._prefetcher.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._wait(0)
        finally:
            sys.setswitchinterval(self._switch_interval)
            if self._prefetcher:
                self._prefetcher.stop()
            self._thread.shutdown()
            self._workers.close()

    def _finish(self, finish: BatchFinisher) -> KnowgateError | None:
        """Grade and write a batch. Returns the error if it could not be graded, otherwise None.

        If writing fails once, later batches are not written, because the rows of a run must have no gap.

        Args:
            finish: Grades the answers of the batch and returns its rows.
        """
        try:
            batch = finish()
        except KnowgateError as error:
            return error
        if not self._has_failed:
            self._has_failed = True  # stays true if the next line raises an error
            self._write(batch)
            self._has_failed = False
        return None

    def _wait(self, max_pending: int) -> None:
        """Wait until at most `max_pending` batches are unwritten. Raises the error if a batch could not be written.

        A batch that could not be graded is labeled again, which also tries its questions one by one.
        """
        while self._pending:
            questions, grading = self._pending[0]
            if len(self._pending) <= max_pending and not grading.done():
                return
            self._pending.popleft()
            if grading.result() is not None:  # an error, because the batch could not be graded
                self._write(self._labeler.label(questions))


def _can_prefetch(labeler: Labeler) -> bool:
    """Return whether passages can be prefetched: there is an index, and no iterative search uses it meanwhile."""
    return labeler.retriever is not None and labeler.plan.open_book and not labeler.plan.iterative
