"""What will be asked for soon, looked up beside the LLM: a thread goes through the questions in the order they come.

Knows a library and the order; not batches, whose sizes nobody knows yet. A question that was not looked up in time, or
comes out of order, is looked up when it is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from knowgate.errors import KnowgateError
from knowgate.labels.library import LookedUp
from knowgate.types import Passage, Question

AT_ONCE = 64  # questions looked up in one go
BATCHES = 2  # of the size asked for last: how far ahead the thread goes
PATIENCE = 5.0  # seconds to wait at the end for a search that is under way
LookUp = Callable[[Sequence[Question]], LookedUp]
Found = tuple[list[Passage], int | None]


class Ahead:
    """Looks up `questions` one portion after another, never much further than they are asked for."""

    def __init__(self, look_up: LookUp, questions: Sequence[Question]):
        self._look_up = look_up
        self._questions = questions
        self._found: dict[str, Found] = {}
        self._coming = {question.id for question in questions}
        self._room = AT_ONCE
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
        self._thread.join(PATIENCE)

    def look_up(self, questions: Sequence[Question]) -> LookedUp:
        """As the library does; what the thread has found is taken, what it is about to look up is waited for."""
        with self._change:
            self._room = max(AT_ONCE, BATCHES * len(questions))
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
        return LookedUp([passages for passages, _ in found], [frequency for _, frequency in found])

    def _go(self) -> None:
        try:
            for place in range(0, len(self._questions), AT_ONCE):
                if not self._may_go_on():
                    return
                some = self._questions[place : place + AT_ONCE]
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

    def _keep(self, found: dict[str, Found | None]) -> None:
        with self._change:
            self._found |= {key: one for key, one in found.items() if one is not None}
            self._coming -= found.keys()
            self._change.notify_all()


def _by_id(questions: Sequence[Question], looked_up: LookedUp) -> dict[str, Found | None]:
    return {question.id: one for question, one in zip(questions, zip(*looked_up, strict=True), strict=True)}
