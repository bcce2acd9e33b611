"""Run the pipeline's work: batches of questions, generation at once or as a stream, and calls from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from knowgate.core.stop_flag import check_stop_flag, open_stoppable_context
from knowgate.core.validation import check_encodable
from knowgate.errors import BadInput, ModelError
from knowgate.models.backend import allow_interruption
from knowgate.pipeline.question_state import QuestionState, measure_time
from knowgate.types import Completion, Model, Prompt, Question, TextEvent, TextStream

MAX_UNREAD_ITEMS = 10_000  # of an answer whose client reads it slowly

Item = TypeVar("Item")
Result = TypeVar("Result")

# --- questions ------------------------------------------------------------------------------------


def as_question(question: str | Question) -> Question:
    """Convert text to a `Question` and check it.

    Raises:
        BadInput: The question is empty, not valid Unicode, or neither text nor a `Question`.
    """
    record = Question(question) if isinstance(question, str) else question
    if not isinstance(record, Question):
        raise BadInput(f"a question must be a text or a Question, got {question!r}.")
    if not record.text.strip():
        raise BadInput("the question is empty. Give it a text.")
    check_encodable(record.text, "the question")
    return record


def check_not_text(questions: object) -> None:
    """Raise BadInput for a text in place of a list. Each letter would become a question."""
    if isinstance(questions, str):
        raise BadInput("questions must be a list, not a single text. For one question use `answer` or `decide`.")


def batch_questions(
    questions: Iterable[str | Question], size: int, first: int | None = None
) -> Iterator[list[Question]]:
    """Yield questions in batches, small ones first. Example: size=8 and first=2 give batches of 2, 4, 8, 8."""
    check_not_text(questions)
    iterator = iter(questions)
    batch_size = first or size
    while batch := [as_question(question) for question in islice(iterator, batch_size)]:
        yield batch
        batch_size = min(size, 2 * batch_size)


# --- generation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerationTask:
    """A prompt for which the LLM generates an answer.

    Attributes:
        state: The question, with everything that is known about it so far. It receives the answer.
        prompt: The prompt.
        resume: Handle with which the model continues an answer that it began while the gate read the question. None
            to generate a new answer.
    """

    state: QuestionState
    prompt: Prompt
    resume: object | None = None


GenerateFunction = Callable[[Model, Sequence[GenerationTask], int], Iterable[TextEvent]]


def generate_batch(model: Model, tasks: Sequence[GenerationTask], max_tokens: int) -> Iterable[TextEvent]:
    """Generate all answers in one call, and store them in the states. No events are returned, as nothing is streamed."""
    prompts = [task.prompt for task in tasks]
    handles = [task.resume for task in tasks]
    resume = None if None in handles else handles  # the tasks are all new (None) or all continued
    with measure_time([task.state for task in tasks], "answer"), allow_interruption(model):
        rows = model.generate(prompts, max_tokens=max_tokens, resume=resume)
    for task, completions in zip(tasks, rows, strict=True):
        task.state.take_completion(completions[0])  # there is one completion per prompt
    return ()


def generate_stream(model: Model, tasks: Sequence[GenerationTask], max_tokens: int) -> Iterable[TextEvent]:
    """Generate answers one by one, and yield their text."""
    for task in tasks:
        if task.state.may_retrieve_again:  # this answer may be replaced, so its text is not streamed
            yield from generate_batch(model, [task], max_tokens)
            continue
        stream = model.stream(task.prompt, max_tokens=max_tokens, resume=task.resume)
        completion = yield from _stream_text(model, task.state, stream)
        task.state.take_completion(completion)


def _stream_text(model: Model, state: QuestionState, stream: TextStream) -> Generator[TextEvent, None, Completion]:
    """Yield the text of an answer in pieces, and return the completion.

    Text is held back until the arbiter can no longer replace it. Text that is still held back at the end is not yielded
    here: the arbiter chooses first.
    """
    pending = ""  # text that is held back
    with closing(stream):
        while True:
            with measure_time([state], "answer"), allow_interruption(model):
                try:
                    piece = next(stream)
                except StopIteration as end:
                    completion: Completion = end.value
                    return completion
            pending += piece
            if state.may_show is None or state.is_shown or state.may_show(pending):
                state.is_shown = True
                yield TextEvent(pending)
                pending = ""


def exhaust_generator(steps: Generator[Any, None, Result]) -> Result:
    """Run a generator to its end, ignore what it yields, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


# --- asyncio --------------------------------------------------------------------------------------
# Blocking work runs in the model's own threads, as many as `Model.concurrency` allows. A local model has one, so
# that concurrent callers, also those of different pipelines, take turns.


async def run_in_model_thread(model: Model, work: Callable[[], Result]) -> Result:
    """Run blocking work in a thread of the model and return its result. Cancelling stops the model."""
    with open_stoppable_context() as context:
        return await asyncio.get_running_loop().run_in_executor(model.workers, lambda: context.run(work))


async def iterate_in_model_thread(model: Model, steps: Generator[Item, None, None]) -> AsyncGenerator[Item, None]:
    """Yield the items of a blocking generator, computed in a thread of the model. Cancelling stops the model."""
    if model.concurrency > 1:  # a remote model, whose generator holds a connection until its end
        async with aclosing(_iterate_in_one_call(model, steps)) as stream:
            async for item in stream:
                yield item
        return
    running = None
    with open_stoppable_context() as context:
        try:
            while True:
                running = model.workers.submit(lambda: context.run(_take_up_to, steps, 1))
                items = await asyncio.wrap_future(running)
                if not items:
                    return
                yield items[0]
        finally:
            if running is not None:
                # The generator can be closed only when the thread has left it. If it has, this happens at once.
                running.add_done_callback(lambda _: steps.close())
            del running  # its error refers to this frame, so the memory of the question could not be freed at once


async def _iterate_in_one_call(model: Model, steps: Generator[Item, None, None]) -> AsyncGenerator[Item, None]:
    """Yield the items of a blocking generator that keeps its thread of the model until its end."""
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[list[Item]] = asyncio.Queue()

    n_read = 0

    def run() -> None:
        with closing(steps):
            for number, item in enumerate(steps):
                if number - n_read > MAX_UNREAD_ITEMS:
                    raise ModelError("the answer was read too slowly. Read the stream as it arrives.")
                loop.call_soon_threadsafe(items.put_nowait, [item])
                check_stop_flag()

    with open_stoppable_context() as context:
        running = asyncio.wrap_future(model.workers.submit(context.run, run))
        running.add_done_callback(lambda _: items.put_nowait([]))
        try:
            while taken := await items.get():
                yield taken[0]
                n_read += 1
            await running
        finally:
            running.cancel()
            del running  # its error refers to this frame, so the memory of the question could not be freed at once


async def batch_async(items: Iterable[Item] | AsyncIterable[Item], size: int) -> AsyncGenerator[list[Item], None]:
    """Yield lists of up to `size` items. A plain iterable may block, so a thread reads it."""
    if not isinstance(items, AsyncIterable):
        iterator = iter(items)
        while taken := await asyncio.to_thread(_take_up_to, iterator, size):
            yield taken
        return
    batch: list[Item] = []
    async for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _take_up_to(items: Iterator[Item], size: int) -> list[Item]:
    """Return the next `size` items; at the end fewer, or none."""
    return list(islice(items, size))
