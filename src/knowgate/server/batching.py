"""Questions that come at about the same time are read and answered together, in one pass of the model.

A batch takes what waits when the model is free. The first of a quiet time waits a moment for company, and no longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field

from knowgate.pipeline import AdaptiveRAG
from knowgate.types import Answer, Question

WAIT = 0.003  # seconds for company
MOST = 16  # questions of a batch; bounds how long one of them can hold up the others


class NotTogether(Exception):
    """The batch failed; each of its questions is answered alone, where failures have a name."""


@dataclass
class Waiting:
    question: Question
    answer: asyncio.Future[Answer]


@dataclass
class Batcher:
    """Questions of one kind (the same pipeline, by `key`) go together. most: 1 switches batches off."""

    most: int = MOST
    wait: float = WAIT
    queues: dict[Hashable, list[Waiting]] = field(default_factory=dict)
    running: set[asyncio.Task[None]] = field(default_factory=set)

    async def answer(self, key: Hashable, rag: AdaptiveRAG, question: Question) -> Answer:
        mine = Waiting(question, asyncio.get_running_loop().create_future())
        if key in self.queues:
            self.queues[key].append(mine)
        else:
            self.queues[key] = [mine]
            task = asyncio.ensure_future(self._serve(key, rag))
            self.running.add(task)
            task.add_done_callback(self.running.discard)
        return await mine.answer

    async def _serve(self, key: Hashable, rag: AdaptiveRAG) -> None:
        """Batch after batch until nobody waits."""
        try:
            await asyncio.sleep(self.wait)
            while queue := self.queues[key]:
                taken = [one for one in queue[: self.most] if not one.answer.done()]  # done: its client hung up
                del queue[: self.most]
                if taken:
                    await self._run(rag, taken)
        finally:
            del self.queues[key]

    async def _run(self, rag: AdaptiveRAG, taken: list[Waiting]) -> None:
        try:
            answers = await rag.aanswer_many([one.question for one in taken])
        except Exception as error:  # noqa: BLE001 - one bad question must not fail the others
            for one in taken:
                if not one.answer.done():
                    one.answer.set_exception(NotTogether(str(error)))
            return
        for one, answer in zip(taken, answers, strict=True):
            if not one.answer.done():
                one.answer.set_result(answer)
