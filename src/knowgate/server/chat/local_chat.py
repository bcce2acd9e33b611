"""Questions that come at about the same time are read and answered together, in one pass of the model.

A batch takes what waits when the model is free. The first of a quiet time waits a moment for company, and no longer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Hashable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import Response

from knowgate.errors import BadInput
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.server.chat.gate_service import GateService, describe_error
from knowgate.server.chat.request_formats import UngatedRequest, extract_question, read_messages
from knowgate.server.chat.request_options import RequestOptions, is_knowgate_model, read_request_options
from knowgate.server.json_api import ApiError, json_response, read_bool
from knowgate.server.options import ServeOptions
from knowgate.server.streaming import DONE_EVENT, EventStreamResponse, format_event
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.types import Answer, AnswerEvent, Decision, DecisionEvent, PassagesEvent, Question, StreamEvent, TextEvent

BATCH_WAIT_SECONDS = 0.003  # seconds for company
MAX_BATCH_SIZE = 16  # questions of a batch; bounds how long one of them can hold up the others


class BatchError(Exception):
    """The batch failed; each of its questions is answered alone, where failures have a name."""


@dataclass
class PendingQuestion:
    question: Question
    answer: asyncio.Future[Answer]


@dataclass
class QuestionBatcher:
    """Questions of one kind (the same pipeline, by `key`) go together. most: 1 switches batches off."""

    most: int = MAX_BATCH_SIZE
    wait: float = BATCH_WAIT_SECONDS
    queues: dict[Hashable, list[PendingQuestion]] = field(default_factory=dict)
    running: set[asyncio.Task[None]] = field(default_factory=set)

    async def answer(self, key: Hashable, rag: AdaptiveRAG, question: Question) -> Answer:
        mine = PendingQuestion(question, asyncio.get_running_loop().create_future())
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

    async def _run(self, rag: AdaptiveRAG, taken: list[PendingQuestion]) -> None:
        try:
            answers = await rag.aanswer_many([one.question for one in taken])
        except Exception as error:  # noqa: BLE001 - one bad question must not fail the others
            for one in taken:
                if not one.answer.done():
                    one.answer.set_exception(BatchError(str(error)))
            return
        for one, answer in zip(taken, answers, strict=True):
            if not one.answer.done():
                one.answer.set_result(answer)


SUPPORTED_FIELDS = {
    "model",
    "messages",
    "stream",
    "stream_options",
    "knowgate",
    "max_tokens",
    "max_completion_tokens",
    "n",
}
IGNORED_FIELDS = {"user", "metadata", "store"}  # they change nothing about an answer
UNSUPPORTED_FIELDS = ("tools", "functions", "logprobs", "audio", "modalities", "prediction")
MAX_CACHED_PIPELINES = 64  # pipelines kept for requests with wishes of their own
log = logging.getLogger(__name__)


@dataclass
class AnswerProgress:
    """An answer while it is made. stage: what is at work, so that a failure has a name."""

    trace: RequestTrace
    stage: str = "gate"
    spoke: bool = False
    answer: Answer | None = None
    until: float = 0.0
    begun: int = field(default_factory=lambda: int(time.time()))

    def take(self, happened: StreamEvent) -> str:
        """The text an event brings."""
        match happened:
            case DecisionEvent(decision):
                self.trace.decision = self._first(decision)
                self.stage = "retrieve" if decision.retrieve else "answer"
            case PassagesEvent(passages):
                self.trace.passages, self.stage = passages, "answer"
            case TextEvent(text):
                self.spoke = True
                return text
            case AnswerEvent(answer):
                self.finish(answer)
        return ""

    def _first(self, decision: Decision) -> Decision:
        """Where something failed, what was decided because of that, not by what took its place."""
        return self.trace.decision or decision if self.trace.degraded else decision

    def finish(self, answer: Answer) -> None:
        self.answer = answer
        self.trace.decision, self.trace.passages = self._first(answer.decision), answer.passages
        self.trace.draft = answer.draft
        self.trace.choice = answer.choice
        for stage, seconds in answer.seconds.items():
            if stage != "total":
                self.trace.add_time(stage, seconds)


class LocalChat:
    """Chats go this way when the model runs here."""

    def __init__(self, keeper: GateService, options: ServeOptions):
        self.keeper = keeper
        self.options = options
        self.batcher = QuestionBatcher(most=options.batch)
        self._chosen: dict[tuple[RequestOptions, int], AdaptiveRAG] = {}

    async def chat(self, body: dict[str, Any], trace: RequestTrace, until: float) -> Response:
        messages, rag = read_messages(body), self.keeper.rag
        policy = self.keeper.assign(read_request_options(body), body, trace)
        self._check(body)
        trace.way, trace.model = "in-process", rag.model.name
        trace.ignored = tuple(sorted(key for key in body if key not in SUPPORTED_FIELDS | IGNORED_FIELDS))[:20]
        workers = rag.model.workers
        asked = await asyncio.get_running_loop().run_in_executor(workers, extract_question, rag.model, messages)
        if isinstance(asked, UngatedRequest):
            raise ApiError(400, f"a model in this process answers questions: {asked.why}.", "not_a_question")
        trace.question = asked.text
        key = (policy, self._tokens(body))
        chosen = self._choose(*key)
        if self.keeper.is_stale(chosen):
            self.keeper.give_up_calibration(chosen, trace)
            key = (replace(policy, retrieve="always", threshold=None, arm="", shadow=""), key[1])
            chosen = self._choose(*key)
        speaking = AnswerProgress(trace, until=until)
        if body.get("stream"):
            return await self._streamed(self._spoken(chosen, asked, speaking), speaking, chosen)
        if self.options.batch > 1:
            return await self._plain(self._together(key, chosen, asked, speaking), speaking, chosen)
        return await self._plain(self._spoken(chosen, asked, speaking), speaking, chosen)

    def _choose(self, policy: RequestOptions, tokens: int) -> AdaptiveRAG:
        """The same pipeline for the same wishes, so that they can go together."""
        if len(self._chosen) > MAX_CACHED_PIPELINES:
            self._chosen.clear()
        if (policy, tokens) not in self._chosen:
            self._chosen[policy, tokens] = self.keeper.choose(policy).replace(max_tokens=tokens)
        return self._chosen[policy, tokens]

    # --- what can be asked ------------------------------------------------------------------------

    def _check(self, body: Mapping[str, Any]) -> None:
        read_bool(body, "stream")
        name = body.get("model")
        if not is_knowgate_model(name) and name != self.keeper.rag.model.name:
            raise ApiError(
                404,
                f"no model '{str(name)[:80]}' here. Known: knowgate, {self.keeper.rag.model.name}.",
                "model_not_found",
            )
        wanted = [key for key in UNSUPPORTED_FIELDS if body.get(key)]
        wanted += ["response_format"] if body.get("response_format") not in (None, {"type": "text"}) else []
        wanted += ["n"] if body.get("n") not in (None, 1) else []
        if wanted:
            raise ApiError(400, f"a model in this process cannot do '{wanted[0]}': use --upstream.", "unsupported")

    def _tokens(self, body: Mapping[str, Any]) -> int:
        asked = body.get("max_completion_tokens", body.get("max_tokens"))
        if asked is None:
            return self.keeper.rag.max_tokens
        if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
            raise ApiError(400, "'max_tokens' must be a whole number of at least 1.", "invalid_type")
        return min(asked, self.options.most_tokens)

    # --- the answer -------------------------------------------------------------------------------

    async def _spoken(
        self, rag: AdaptiveRAG, question: Question, speaking: AnswerProgress
    ) -> AsyncGenerator[str, None]:
        """Pieces of the answer. A gate that fails is as good as one that says retrieve; so on, down to no documents."""
        while True:
            try:
                async with aclosing(rag.aanswer_stream(question)) as happening:
                    async for happened in happening:
                        if text := speaking.take(happened):
                            yield text
                return
            except BadInput as error:
                raise ApiError(400, str(error)) from None
            except Exception as error:  # noqa: BLE001 - whatever fails, the question is answered if it can be
                rag = self._next_best(rag, speaking, error)

    async def _together(
        self, key: tuple[RequestOptions, int], rag: AdaptiveRAG, question: Question, speaking: AnswerProgress
    ) -> AsyncGenerator[str, None]:
        """The whole answer, made beside those of others; alone, where that fails."""
        if not self.keeper.is_stale(rag):
            try:
                answer = await self.batcher.answer(key, rag, question)
            except BatchError:
                pass
            else:
                speaking.finish(answer)
                yield answer.text
                return
        async with aclosing(self._spoken(rag, question, speaking)) as pieces:
            async for piece in pieces:
                yield piece

    def _next_best(self, rag: AdaptiveRAG, speaking: AnswerProgress, error: Exception) -> AdaptiveRAG:
        """The pipeline to try after this failure."""
        why = describe_error(error, self.options.deadline)
        failed, speaking.stage = speaking.stage, "gate"
        if not speaking.spoke and failed == "gate" and rag.gate.name not in ("always", "never"):
            self.keeper.give_up_gate(rag, speaking.trace, why)
            if rag.retriever is not None:
                return rag.replace(gate=self.keeper.always, threshold=None)
        if not speaking.spoke and failed == "retrieve":
            self.keeper.give_up_retriever(speaking.trace, why)
        if speaking.spoke or failed == "answer" or rag.gate.name == "never":
            log.error("The model failed: %s", why)
            raise ApiError(500, "the model failed.", "model_failed", speaking.trace.headers) from error
        return rag.replace(gate=self.keeper.never, threshold=None, arbiter=None)

    async def _plain(self, pieces: AsyncGenerator[str, None], speaking: AnswerProgress, rag: AdaptiveRAG) -> Response:
        async with asyncio.timeout_at(speaking.until), aclosing(pieces):
            text = "".join([piece async for piece in pieces])
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": _finish(speaking, rag),
        }
        record = {**_head(speaking, rag, "chat.completion"), "choices": [choice], "usage": _usage(speaking, rag)}
        return json_response({**record, "knowgate": speaking.trace.record}, headers=speaking.trace.headers)

    async def _streamed(
        self, pieces: AsyncGenerator[str, None], speaking: AnswerProgress, rag: AdaptiveRAG
    ) -> Response:
        """Begins with the first text, so that the headers know the decision."""
        try:
            async with asyncio.timeout_at(speaking.until):
                first = await anext(pieces, "")
        except BaseException:
            await pieces.aclose()
            raise
        return EventStreamResponse(_chunks(first, pieces, speaking, rag), speaking.trace.headers, speaking.until)


async def _chunks(
    first: str, pieces: AsyncGenerator[str, None], speaking: AnswerProgress, rag: AdaptiveRAG
) -> AsyncGenerator[bytes, None]:
    head = _head(speaking, rag, "chat.completion.chunk")

    def chunk(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    try:
        yield format_event({**chunk({"role": "assistant", "content": first}), "knowgate": speaking.trace.record})
        async for piece in pieces:
            yield format_event(chunk({"content": piece}))
        yield format_event({**chunk({}, _finish(speaking, rag)), "knowgate": speaking.trace.record})
        yield DONE_EVENT
    except ApiError as problem:
        yield format_event(problem.record)
    finally:
        await pieces.aclose()


def _head(speaking: AnswerProgress, rag: AdaptiveRAG, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{speaking.trace.id}", "object": kind, "created": speaking.begun, "model": rag.model.name}


def _finish(speaking: AnswerProgress, rag: AdaptiveRAG) -> str:
    return "length" if speaking.answer is not None and speaking.answer.n_tokens >= rag.max_tokens else "stop"


def _usage(speaking: AnswerProgress, rag: AdaptiveRAG) -> dict[str, int]:
    """Tokens of the answer; those of the prompt are not counted."""
    made = speaking.answer.n_tokens if speaking.answer is not None else 0
    return {"prompt_tokens": 0, "completion_tokens": made, "total_tokens": made}
