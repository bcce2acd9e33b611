"""The two ways an answer is spoken: a batch at once, or one answer piece by piece.

All else of the way of a question is the same for both. Knows models by their protocol; nothing of gates or passages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from knowgate.pipeline.case import Case, timed
from knowgate.types import Completion, Model, Prompt, TextEvent, TextStream

Result = TypeVar("Result")


@dataclass(frozen=True)
class Task:
    """A case and what the LLM is to answer for it. resume: the draft to go on from."""

    case: Case
    prompt: Prompt
    resume: object | None = None


Speak = Callable[[Model, Sequence[Task], int], Iterable[TextEvent]]


def at_once(model: Model, tasks: Sequence[Task], max_tokens: int) -> Iterable[TextEvent]:
    """One call for all tasks, which have all a draft or all none. Nothing is heard of it before it is done."""
    handles = [task.resume for task in tasks]
    with timed([task.case for task in tasks], "answer"):
        rows = model.generate(
            [task.prompt for task in tasks],
            max_tokens=max_tokens,
            resume=None if None in handles else handles,
        )
    for task, completions in zip(tasks, rows, strict=True):
        task.case.take(completions[0])
    return ()


def in_pieces(model: Model, tasks: Sequence[Task], max_tokens: int) -> Iterable[TextEvent]:
    """One task after the other. An answer that only serves to look up more is not shown."""
    for task in tasks:
        if task.case.may_look_further:
            yield from at_once(model, [task], max_tokens)
            continue
        stream = model.stream(task.prompt, max_tokens=max_tokens, resume=task.resume)
        task.case.take((yield from _told(task.case, stream)))


def _told(case: Case, stream: TextStream) -> Generator[TextEvent, None, Completion]:
    """The pieces as events, once they may be heard. Only making them counts as time, not what the listener does."""
    held = ""
    try:
        while True:
            with timed([case], "answer"):
                try:
                    piece = next(stream)
                except StopIteration as end:
                    completion: Completion = end.value
                    return completion
            held += piece
            if case.lets_out is not None and not case.was_let_out:
                case.was_let_out = case.lets_out(held)
            if case.lets_out is None or case.was_let_out:
                yield TextEvent(held)
                held = ""
    finally:
        stream.close()


def run_through(steps: Generator[Any, None, Result]) -> Result:
    """What a generator gives back, when what it yields is nobody's concern."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
