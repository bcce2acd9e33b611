"""Labelling where the LLM never waits: looking up goes ahead of it, grading and writing come after, in threads.

Two threads beside the one that runs the LLM. Knows the labeller and what is to be done with its rows; not how batches
are cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Self

from knowgate.errors import KnowgateError
from knowgate.labels.ahead import Ahead
from knowgate.labels.labeller import Finish, LabelledBatch, Labeller
from knowgate.types import Question

WAITING = 1  # batches that may wait to be graded and written while the LLM goes on


class Overlap:
    """The work of a runner whose batches follow each other in the order of `questions`.

    keep: told each batch when it is whole, in order, in a thread of its own. What the LLM has answered is kept even
    where the next batch fails or is interrupted.
    """

    def __init__(self, labeller: Labeller, questions: Sequence[Question], keep: Callable[[LabelledBatch], None]):
        self._ahead = Ahead(labeller.library.look_up, questions) if _can_go_ahead(labeller) else None
        self._labeller = replace(labeller, look_up=self._ahead.look_up) if self._ahead else labeller
        self._keep = keep
        self._has_failed = False
        self._beside = ThreadPoolExecutor(1, "knowgate-keep")
        self._waiting: deque[tuple[Sequence[Question], Future[KnowgateError | None]]] = deque()

    def __call__(self, questions: Sequence[Question]) -> int:
        """Gives how many questions were answered; their rows follow."""
        finish = self._labeller.begin(questions)
        self._waiting.append((questions, self._beside.submit(self._finish, finish)))
        self._settle(WAITING)
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

    def _finish(self, finish: Finish) -> KnowgateError | None:
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


def _can_go_ahead(labeller: Labeller) -> bool:
    """Whether there is something to look up, and nobody else searches at the same time."""
    return labeller.retriever is not None and labeller.plan.open_book and not labeller.plan.iterative
