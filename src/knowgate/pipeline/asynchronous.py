"""Blocking work beside an event loop: in the model's own threads, so that the loop never waits.

A model has as many threads as may use it at once (`Model.concurrency`): one where it runs on this machine, so that
callers take turns, also callers of different pipelines. Knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from knowgate.types import Model

Item = TypeVar("Item")
Result = TypeVar("Result")


async def run_beside(model: Model, work: Callable[[], Result]) -> Result:
    """What `work` gives, or its error as it is. Cancelled before its turn it never begins; once begun it runs on."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(model.workers, lambda: context.run(work))


async def iterate_beside(model: Model, steps: Generator[Item, None, None]) -> AsyncGenerator[Item, None]:
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


async def take_batches(items: Iterable[Item] | AsyncIterable[Item], size: int) -> AsyncGenerator[list[Item], None]:
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
