"""The two ways an answer is spoken: a batch at once, or one answer piece by piece.

All else of the way of a question is the same for both. Knows models by their protocol; nothing of gates or passages.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from knowgate.core.validation import check_encodable
from knowgate.errors import BadInput
from knowgate.pipeline.question_state import QuestionState, measure_time
from knowgate.types import Completion, Model, Prompt, Question, TextEvent, TextStream

ReturnValue = TypeVar("ReturnValue")


@dataclass(frozen=True)
class GenerationTask:
    """A case and what the LLM is to answer for it. resume: the draft to go on from."""

    case: QuestionState
    prompt: Prompt
    resume: object | None = None


GenerateFunction = Callable[[Model, Sequence[GenerationTask], int], Iterable[TextEvent]]


def generate_batch(model: Model, tasks: Sequence[GenerationTask], max_tokens: int) -> Iterable[TextEvent]:
    """One call for all tasks, which have all a draft or all none. Nothing is heard of it before it is done."""
    handles = [task.resume for task in tasks]
    with measure_time([task.case for task in tasks], "answer"):
        rows = model.generate(
            [task.prompt for task in tasks],
            max_tokens=max_tokens,
            resume=None if None in handles else handles,
        )
    for task, completions in zip(tasks, rows, strict=True):
        task.case.take(completions[0])
    return ()


def generate_stream(model: Model, tasks: Sequence[GenerationTask], max_tokens: int) -> Iterable[TextEvent]:
    """One task after the other. An answer that only serves to look up more is not shown."""
    for task in tasks:
        if task.case.may_look_further:
            yield from generate_batch(model, [task], max_tokens)
            continue
        stream = model.stream(task.prompt, max_tokens=max_tokens, resume=task.resume)
        task.case.take((yield from _told(task.case, stream)))


def _told(case: QuestionState, stream: TextStream) -> Generator[TextEvent, None, Completion]:
    """The pieces as events, once they may be heard. Only making them counts as time, not what the listener does."""
    held = ""
    try:
        while True:
            with measure_time([case], "answer"):
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


def exhaust_generator(steps: Generator[Any, None, ReturnValue]) -> ReturnValue:
    """What a generator gives back, when what it yields is nobody's concern."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: ReturnValue = end.value
            return result


Item = TypeVar("Item")
Result = TypeVar("Result")


async def run_in_model_thread(model: Model, work: Callable[[], Result]) -> Result:
    """What `work` gives, or its error as it is. Cancelled before its turn it never begins; once begun it runs on."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(model.workers, lambda: context.run(work))


async def iterate_in_model_thread(model: Model, steps: Generator[Item, None, None]) -> AsyncGenerator[Item, None]:
    """The items, each made in a turn of its own: several streams of a local model go on side by side.

    Cancelled or left, the generator is closed as soon as the item it is making is done.
    """
    context = contextvars.copy_context()
    running = None
    try:
        while True:
            running = model.workers.submit(lambda: context.run(_take, steps, 1))
            made = await asyncio.wrap_future(running)
            if not made:
                return
            yield made[0]
    finally:
        if running is not None:
            running.add_done_callback(lambda _: steps.close())  # at once where nothing is running


async def batch_async(items: Iterable[Item] | AsyncIterable[Item], size: int) -> AsyncGenerator[list[Item], None]:
    """Lists of up to `size` items, taken when they are asked for. A plain iterable may block: a thread reads it."""
    batch: list[Item] = []
    if not isinstance(items, AsyncIterable):
        waiting = iter(items)
        while batch := await asyncio.to_thread(_take, waiting, size):
            yield batch
        return
    async for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _take(items: Iterator[Item], size: int) -> list[Item]:
    return list(islice(items, size))


def batch_questions(
    questions: Iterable[str | Question], size: int, first: int | None = None
) -> Iterator[list[Question]]:
    """Questions in lists of this size. first: the first ones are smaller, each twice the one before."""
    check_not_text(questions)
    waiting, now = iter(questions), first or size
    while taken := [as_question(question) for question in islice(waiting, now)]:
        yield taken
        now = min(size, 2 * now)


def check_not_text(questions: object) -> None:
    """A text is a sequence, too: of its letters."""
    if isinstance(questions, str):
        raise BadInput("questions are a list; for one question there are `answer` and `decide`.")


def as_question(question: str | Question) -> Question:
    """A question record; text is checked, not changed."""
    record = Question(question) if isinstance(question, str) else question
    if not isinstance(record, Question):
        raise BadInput(f"a question is a text or a Question, not {question!r}.")
    if not record.text.strip():
        raise BadInput("the question is empty: ask something.")
    check_encodable(record.text, "the question")
    return record
