"""What will be asked for soon, looked up beside the LLM: a thread goes through the questions in the order they come.

Knows a library and the order; not batches, whose sizes nobody knows yet. A question that was not looked up in time, or
comes out of order, is looked up when it is asked for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from knowgate.errors import KnowgateError
from knowgate.labels.labeler import BatchFinisher, LabeledBatch, Labeler
from knowgate.labels.passages import PassageSearchResults
from knowgate.types import Passage, Question, Result

PREFETCH_SIZE = 64  # questions looked up in one go
PREFETCH_BATCHES = 2  # of the size asked for last: how far ahead the thread goes
STOP_TIMEOUT = 5.0  # seconds to wait at the end for a search that is under way
PassageLookup = Callable[[Sequence[Question]], PassageSearchResults]
QuestionPassages = tuple[list[Passage], int | None]


class PassagePrefetcher:
    """Looks up `questions` one portion after another, never much further than they are asked for."""

    def __init__(self, look_up: PassageLookup, questions: Sequence[Question]):
        self._look_up = look_up
        self._questions = questions
        self._found: dict[str, QuestionPassages] = {}
        self._coming = {question.id for question in questions}
        self._room = PREFETCH_SIZE
        self._is_awaited = False
        self._is_over = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._go, name="knowgate-ahead", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._change:
            self._is_over = True
            self._change.notify_all()
        self._thread.join(STOP_TIMEOUT)

    def look_up(self, questions: Sequence[Question]) -> PassageSearchResults:
        """As the library does; what the thread has found is taken, what it is about to look up is waited for."""
        with self._change:
            self._room = max(PREFETCH_SIZE, PREFETCH_BATCHES * len(questions))
            self._is_awaited = True
            self._change.notify_all()
            self._change.wait_for(
                lambda: self._is_over or not any(question.id in self._coming for question in questions)
            )
            self._is_awaited = False
            taken = {question.id: self._found.pop(question.id, None) for question in questions}
            self._change.notify_all()
        missing = [question for question in questions if taken[question.id] is None]
        if missing:
            taken |= _by_id(missing, self._look_up(missing))
        found = [one for one in (taken[question.id] for question in questions) if one is not None]
        return PassageSearchResults([passages for passages, _ in found], [frequency for _, frequency in found])

    def _go(self) -> None:
        try:
            for place in range(0, len(self._questions), PREFETCH_SIZE):
                if not self._may_go_on():
                    return
                some = self._questions[place : place + PREFETCH_SIZE]
                self._keep(_by_id(some, self._look_up(some)))
        except KnowgateError:
            pass  # whoever asks for these questions looks them up, and hears of it
        finally:
            with self._change:
                self._is_over = True
                self._change.notify_all()

    def _may_go_on(self) -> bool:
        with self._change:
            self._change.wait_for(lambda: self._is_over or self._is_awaited or len(self._found) < self._room)
            return not self._is_over

    def _keep(self, found: dict[str, QuestionPassages | None]) -> None:
        with self._change:
            self._found |= {key: one for key, one in found.items() if one is not None}
            self._coming -= found.keys()
            self._change.notify_all()


def _by_id(questions: Sequence[Question], looked_up: PassageSearchResults) -> dict[str, QuestionPassages | None]:
    return {question.id: one for question, one in zip(questions, zip(*looked_up, strict=True), strict=True)}


MAX_PENDING_BATCHES = 1  # batches that may wait to be graded and written while the LLM goes on


class LabelingPipeline:
    """The work of a runner whose batches follow each other in the order of `questions`.

    keep: told each batch when it is whole, in order, in a thread of its own. What the LLM has answered is kept even
    where the next batch fails or is interrupted.
    """

    def __init__(self, labeller: Labeler, questions: Sequence[Question], keep: Callable[[LabeledBatch], None]):
        self._ahead = PassagePrefetcher(labeller.library.look_up, questions) if _can_go_ahead(labeller) else None
        self._labeller = replace(labeller, look_up=self._ahead.look_up) if self._ahead else labeller
        self._keep = keep
        self._has_failed = False
        self._beside = ThreadPoolExecutor(1, "knowgate-keep")
        self._waiting: deque[tuple[Sequence[Question], Future[KnowgateError | None]]] = deque()

    def __call__(self, questions: Sequence[Question]) -> int:
        """Gives how many questions were answered; their rows follow."""
        finish = self._labeller.begin(questions)
        self._waiting.append((questions, self._beside.submit(self._finish, finish)))
        self._settle(MAX_PENDING_BATCHES)
        return len(questions)

    def __enter__(self) -> Self:
        if self._ahead:
            self._ahead.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._settle(0)
        finally:
            if self._ahead:
                self._ahead.stop()
            self._beside.shutdown()

    def _finish(self, finish: BatchFinisher) -> KnowgateError | None:
        try:
            part = finish()
        except KnowgateError as error:
            return error
        if not self._has_failed:
            self._has_failed = True  # until it is done: after a batch that could not be kept, none is
            self._keep(part)
            self._has_failed = False
        return None

    def _settle(self, most: int) -> None:
        """Wait until no more than `most` batches are unfinished; one that could not be finished is labelled again."""
        while len(self._waiting) > most or (self._waiting and self._waiting[0][1].done()):
            questions, finished = self._waiting.popleft()
            if finished.result() is not None:
                self._keep(self._labeller.label(questions))


def _can_go_ahead(labeller: Labeler) -> bool:
    """Whether there is something to look up, and nobody else searches at the same time."""
    return labeller.retriever is not None and labeller.plan.open_book and not labeller.plan.iterative


@dataclass(frozen=True)
class LocalRunner:
    """Starts with `first` questions and takes more while a batch takes less than `seconds`, up to `largest`.

    Twice as many, four times where it took less than a quarter: a GPU takes as long for four questions as for hundreds.
    So rows appear soon on a slow machine, and a fast one is kept busy.
    """

    first: int = 4
    largest: int = 2_048
    seconds: float = 10.0

    def run(self, questions: Sequence[Question], work: Callable[[Sequence[Question]], Result]) -> Iterator[Result]:
        size, place = self.first, 0
        while place < len(questions):
            batch = questions[place : place + size]
            start = time.perf_counter()
            yield work(batch)
            place += len(batch)
            size = self.next_size(size, time.perf_counter() - start)

    def next_size(self, size: int, took: float) -> int:
        """How many after a batch of `size` that took so many seconds."""
        if took >= self.seconds:
            return size
        return min(self.largest, size * (4 if took < self.seconds / 4 else 2))
