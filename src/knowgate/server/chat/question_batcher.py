"""Answers simultaneous questions in one batch, for a model in this process."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import zip_longest

from knowgate.models.backend import CLIENT
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.server.telemetry.trace import TokenUsage, count_usage
from knowgate.types import Answer, Question

BATCH_WAIT_SECONDS = 0.003
MAX_BATCH_SIZE = 16  # a larger batch would make a single question wait longer for the others


class BatchError(Exception):
    """A batch of questions failed. One bad question may be the cause, so each question must be answered on its own."""


@dataclass
class PendingQuestion:
    """Question that waits for the next batch. `owner` is the API key, `answer` receives the result."""

    question: Question
    owner: str
    answer: asyncio.Future[tuple[Answer, TokenUsage]]


@dataclass
class QuestionBatcher:
    """Queue that answers simultaneous questions in one batch.

    Only questions with the same key, i.e. the same pipeline, share a batch. API keys get equal shares.
    """

    max_batch_size: int = MAX_BATCH_SIZE
    wait_seconds: float = BATCH_WAIT_SECONDS
    _queues: dict[Hashable, list[PendingQuestion]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)  # asyncio keeps only weak references to tasks

    async def answer(self, key: Hashable, rag: AdaptiveRAG, question: Question) -> tuple[Answer, TokenUsage]:
        """Answer a question in a batch with other questions of the same key.

        Returns:
            The answer, and the tokens of all calls to the LLM.

        Raises:
            BatchError: The batch failed.
        """
        pending = PendingQuestion(question, CLIENT.get(), asyncio.get_running_loop().create_future())
        if key in self._queues:
            self._queues[key].append(pending)
        else:
            self._queues[key] = [pending]
            task = asyncio.ensure_future(self._run_batches(key, rag))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await pending.answer

    async def _run_batches(self, key: Hashable, rag: AdaptiveRAG) -> None:
        """Answer the waiting questions with this key, batch by batch."""
        try:
            await asyncio.sleep(self.wait_seconds)
            while queue := self._queues[key]:
                waiting = _order_fairly(queue)
                batch = waiting[: self.max_batch_size]
                queue[:] = waiting[self.max_batch_size :]
                if batch:
                    CLIENT.set(batch[0].owner)  # this task has a context of its own
                    await self._run_batch(rag, batch)
        finally:
            del self._queues[key]

    async def _run_batch(self, rag: AdaptiveRAG, batch: list[PendingQuestion]) -> None:
        """Answer a batch of questions, and set the results or errors of their futures."""
        work = asyncio.ensure_future(_answer_batch(rag, [pending.question for pending in batch]))

        def stop_if_unwanted(_: object) -> None:
            if all(pending.answer.done() for pending in batch):
                work.cancel()

        for pending in batch:
            pending.answer.add_done_callback(stop_if_unwanted)
        try:
            await asyncio.wait([work])
            if work.cancelled():
                return
            answers, usages = work.result()
        except Exception as error:  # noqa: BLE001 - one bad question must not fail the others
            for pending in batch:
                if not pending.answer.done():
                    pending.answer.set_exception(BatchError(str(error)))
            return
        for pending, answer, usage in zip(batch, answers, usages, strict=True):
            if not pending.answer.done():
                pending.answer.set_result((answer, usage))


def _order_fairly(questions: list[PendingQuestion]) -> list[PendingQuestion]:
    """Order questions so that API keys take turns. Example: a1 a2 b1 becomes a1 b1 a2."""
    by_owner: defaultdict[str, list[PendingQuestion]] = defaultdict(list)
    for pending in questions:
        if not pending.answer.done():  # otherwise the client has disconnected
            by_owner[pending.owner].append(pending)
    return [pending for turn in zip_longest(*by_owner.values()) for pending in turn if pending is not None]


async def _answer_batch(rag: AdaptiveRAG, questions: list[Question]) -> tuple[list[Answer], list[TokenUsage]]:
    """Answer a batch of questions. Return the answers and their token counts."""
    answers = await rag.aanswer_many(questions)
    loop = asyncio.get_running_loop()
    usages = await loop.run_in_executor(rag.model.workers, lambda: [count_usage(answer, rag) for answer in answers])
    return answers, usages
