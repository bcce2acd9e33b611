"""Answers chats with a model in this process.

The model answers plain questions with knowgate's own prompts. Requests that ask for unsupported features (tools, several
choices, JSON mode) are rejected. Other unknown fields and system messages are ignored and listed in the response.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Hashable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from starlette.responses import Response

from knowgate.errors import BadInput
from knowgate.gates import TEXT_ONLY_GATE
from knowgate.models.backend import can_interrupt
from knowgate.models.fair_executor import CLIENT
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.execution import run_in_model_thread
from knowgate.server.chat.gate_service import GateService
from knowgate.server.chat.local_pipeline import BatchError, GuardedStageRunner, QuestionBatcher, TracedQuestion
from knowgate.server.chat.request_formats import UngatedRequest, extract_question, may_be_follow_up
from knowgate.server.chat.request_options import (
    RequestOptions,
    UnprovenGate,
    is_knowgate_model,
    require_guarantee,
)
from knowgate.server.client_connection import EventStreamResponse
from knowgate.server.json_api import ApiError, json_response, parse_request
from knowgate.server.load_limits import get_reason
from knowgate.server.options import ServeOptions
from knowgate.server.schemas import LocalChatRequest
from knowgate.server.streaming import DONE_EVENT, format_error_end, format_event
from knowgate.server.telemetry.trace import RequestTrace, RewriteMeter, TokenUsage, count_usage
from knowgate.server.upstream.response_body import read_chat
from knowgate.types import Answer, Decision, DecisionNote, Model, PassagesEvent, Question, StreamEvent, TokenizingModel
from knowgate.types.records import AnswerEvent, DecisionEvent, TextEvent

ONLY_VALUES = {"response_format": {"type": "text"}, "modalities": ["text"], "n": 1}  # other values are not supported
SUPPORTED_FIELDS = {*LocalChatRequest.model_fields, "stream_options", *ONLY_VALUES}
HARMLESS_FIELDS = {"user", "metadata", "store"}  # they have no effect on an answer, so they are not reported
UNSUPPORTED_FIELDS = ("tools", "functions", "logprobs", "audio", "prediction")
MAX_IGNORED_FIELDS, MAX_FIELD_NAME_CHARS = 20, 80  # of ignored fields that are reported
SYSTEM_MESSAGE = "system message"  # how it is named among the ignored fields
MAX_CACHED_PIPELINES = 64


@dataclass
class AnswerProgress:
    """State of an answer that is being generated.

    Attributes:
        trace: Trace of the request.
        stage: The stage that runs now: "gate", "retrieve" or "answer". If an error occurs, this stage has failed.
        has_text: Whether a part of the answer has already been generated.
        answer: The finished answer.
        usage: Tokens of all calls to the LLM for the question, if they have been counted.
        rewrite_usage: Tokens of the LLM call that rewrote a follow-up as a standalone question.
        streams_usage: Whether the last event of the stream reports the token counts.
        deadline: Time of the event loop's clock at which the request must have ended.
        created: When the answer was started, in seconds since 1970.
        fallback: Decision to report instead of that of the pipeline, if the server decided without the gate or had to
            start again. Its reason says what failed.
    """

    trace: RequestTrace
    stage: str = "gate"
    has_text: bool = False
    answer: Answer | None = None
    usage: TokenUsage | None = None
    rewrite_usage: TokenUsage = field(default_factory=TokenUsage)
    streams_usage: bool = False
    deadline: float = 0.0
    created: int = field(default_factory=lambda: int(time.time()))
    fallback: Decision | None = None

    def handle(self, event: StreamEvent) -> str:
        """Record an event of the pipeline, and return its new text ("" for none)."""
        match event:
            case DecisionEvent(decision):
                self.trace.decision = self.fallback or decision
                self.stage = "retrieve" if decision.retrieve else "answer"
            case PassagesEvent(passages):
                self.trace.passages = passages
                self.stage = "answer"
            case TextEvent(text):
                self.has_text = True
                return text
            case AnswerEvent(answer):
                self.finish(answer)
        return ""

    def finish(self, answer: Answer) -> None:
        """Record the finished answer, with its decision, passages and timings, in the trace."""
        self.answer = answer
        self.trace.decision = self.fallback or answer.decision
        self.trace.passages = answer.passages
        self.trace.draft = answer.draft
        self.trace.choice = answer.choice
        for stage, seconds in answer.seconds.items():
            if stage != "total":
                self.trace.add_time(stage, seconds)


class LocalChat:
    """Answers chat requests with the model in this process."""

    def __init__(self, gate_service: GateService, options: ServeOptions):
        self.gate_service = gate_service
        self.options = options
        self._batcher = QuestionBatcher(max_batch_size=options.batch)
        self._pipelines: dict[tuple[RequestOptions, int], AdaptiveRAG] = {}

    async def chat(self, body: dict[str, Any], body_bytes: int, trace: RequestTrace, deadline: float) -> Response:
        """Answer a chat request, as a stream or in a batch. `deadline` is a time of the event loop.

        Raises:
            ApiError: 400 or 404 if the request is invalid, unsupported, or does not end with a plain question.
        """
        request = parse_request(LocalChatRequest, body)
        model = self.gate_service.rag.model
        options = await self.gate_service.read_options(body, trace)
        self._check_supported(body)
        trace.way = "in-process"
        trace.model_name = model.name
        trace.ignored_fields = _list_ignored(body)
        meter = RewriteMeter(model)
        question = TracedQuestion.from_question(await self._extract_question(request, body_bytes, meter), trace)
        if meter.seconds:
            trace.add_time("rewrite", meter.seconds)
        trace.set_question(question)
        options = replace(options, shares_labels=trace.shares_labels)
        max_tokens = self.gate_service.rag.max_tokens
        if requested_tokens := request.max_completion_tokens or request.max_tokens:
            max_tokens = min(requested_tokens, self.options.most_tokens)
        options = await self._replace_stale_gate(options, max_tokens, question, trace)
        rag = self._get_pipeline(options, max_tokens)
        progress = AnswerProgress(trace, deadline=deadline, rewrite_usage=meter.usage, fallback=trace.decision)
        progress.streams_usage = _wants_usage(body)
        if body.get("stream"):
            return await self._respond_streaming(self._generate(rag, question, progress), progress, rag)
        if self.options.batch > 1 and model.concurrency == 1:  # a server of LLMs makes batches itself
            # If calls of other API keys can interrupt a batch, it must hold questions of one key only.
            owner = CLIENT.get() if can_interrupt(model) else ""
            is_proven = not isinstance(rag.gate, UnprovenGate)
            pieces = self._generate_batched((options, max_tokens, is_proven, owner), rag, question, progress)
        else:
            pieces = self._generate(rag, question, progress)
        return await self._respond(pieces, progress, rag)

    async def _extract_question(self, request: LocalChatRequest, body_bytes: int, meter: RewriteMeter) -> Question:
        """Return the question at the end of a chat, or raise an ApiError (400) if there is none.

        The model rewrites a follow-up question in its own thread. `meter` measures that. Canceling stops it.
        """
        model = cast(Model, meter)  # not a full model, but rewriting only calls `generate`
        extract = partial(extract_question, model, request.messages)
        if may_be_follow_up(request.messages):
            question = await run_in_model_thread(meter.model, extract)
        else:
            question = await read_chat(body_bytes, extract)
        if isinstance(question, UngatedRequest):
            message = f"a model in this process answers plain questions only, but {question.reason}."
            raise ApiError(400, message, "not_a_question")
        return question

    async def _replace_stale_gate(
        self, options: RequestOptions, max_tokens: int, question: Question, trace: RequestTrace
    ) -> RequestOptions:
        """Return the options, with a replacement for a gate that was calibrated for another LLM, prompt or index."""
        rag = self._get_pipeline(options, max_tokens)
        reason = self.gate_service.get_staleness(rag, "")
        if not reason:
            return options
        gate = TEXT_ONLY_GATE  # always retrieves, unless a rule decides
        if await self.gate_service.apply_rules(rag, question) is None:
            self.gate_service.bypass_stale_gate(rag, trace, reason)
            gate = "always"
        return replace(options, retrieve="auto", gate=gate, threshold=None, arm="")

    def _get_pipeline(self, options: RequestOptions, max_tokens: int) -> AdaptiveRAG:
        """Return a cached pipeline for these options. Whether its gate has a demanded guarantee is checked each time."""
        if len(self._pipelines) > MAX_CACHED_PIPELINES:
            self._pipelines.clear()
        key = (replace(options, max_loss=None), max_tokens)
        if key not in self._pipelines:
            runner = GuardedStageRunner(self.gate_service, asyncio.get_running_loop())
            rag = self.gate_service.select_pipeline(key[0])
            self._pipelines[key] = rag.replace(max_tokens=max_tokens, runner=runner)
        return require_guarantee(self._pipelines[key], options)

    def _check_supported(self, body: Mapping[str, Any]) -> None:
        """Check that the model in this process supports the request.

        Raises:
            ApiError: 404 if the model name is unknown, 400 if a field asks for an unsupported feature.
        """
        model = body.get("model")
        name = self.gate_service.rag.model.name
        if not is_knowgate_model(model) and model != name:
            message = f"unknown model '{str(model)[:80]}'. Known models: knowgate, {name}."
            raise ApiError(404, message, "model_not_found")
        unsupported = [key for key in UNSUPPORTED_FIELDS if body.get(key)]
        unsupported += [key for key, value in ONLY_VALUES.items() if body.get(key) not in (None, value)]
        if unsupported:
            message = f"the field '{unsupported[0]}' is supported only by servers with an upstream. Remove it from the request."
            raise ApiError(400, message, "unsupported")

    # --- generating -------------------------------------------------------------------------------

    async def _generate(
        self, rag: AdaptiveRAG, question: TracedQuestion, progress: AnswerProgress
    ) -> AsyncGenerator[str, None]:
        """Yield the answer piece by piece. After an early failure, start again without the failed component."""
        while True:
            try:
                async with aclosing(rag.aanswer_stream(question)) as events:
                    async for event in events:
                        text = progress.handle(event)
                        question.check()
                        if text:
                            yield text
                return
            except ApiError:
                raise
            except BadInput as error:
                raise ApiError(400, str(error)) from None
            except Exception as error:  # noqa: BLE001 - whatever fails, the question is answered if possible
                rag = self._choose_fallback(rag, progress, error)

    async def _generate_batched(
        self, batch_key: Hashable, rag: AdaptiveRAG, question: TracedQuestion, progress: AnswerProgress
    ) -> AsyncGenerator[str, None]:
        """Yield the whole answer at once, from a batch. If the batch fails, answer the question on its own."""
        with suppress(BatchError):
            answer, progress.usage = await self._batcher.answer(batch_key, rag, question)
            progress.finish(answer)
            question.check()
            yield answer.text
            return
        async with aclosing(self._generate(rag, question, progress)) as pieces:
            async for piece in pieces:
                yield piece

    def _choose_fallback(self, rag: AdaptiveRAG, progress: AnswerProgress, error: Exception) -> AdaptiveRAG:
        """Return the pipeline for the next attempt, without the failed component.

        Args:
            rag: The pipeline that failed.
            progress: State of the answer. Its stage is the one that failed.
            error: The error.

        Raises:
            ApiError: 500 if the LLM failed, or if a part of the answer has already been sent. 503 if the search failed
                and the server is strict.
        """
        reason = get_reason(error, self.options.deadline)
        failed_stage = progress.stage
        progress.stage = "gate"  # where the next attempt begins
        # A pipeline that never retrieves runs no gate and no search, so only the model can have failed.
        never_retrieves = rag.gate.name == "never" and not rag.shadow
        if progress.has_text or failed_stage == "answer" or never_retrieves:
            self.gate_service.limited_log.write("The model failed: %s", reason, level=logging.ERROR)
            message = "the model failed to generate an answer. The log of the server has the reason."
            raise ApiError(500, message, "model_failed") from error
        if failed_stage == "gate" and rag.gate.name not in ("always", "never"):
            progress.fallback = self.gate_service.bypass_failed_gate(rag, progress.trace, reason)
            if rag.retriever is not None:
                return rag.replace(gate=self.gate_service.always_gate, threshold=None)
        if failed_stage == "retrieve":
            self.gate_service.bypass_retriever(progress.trace, reason)
        progress.fallback = progress.trace.decision
        # In shadow mode, the pipeline would search again.
        return rag.replace(gate=self.gate_service.never_gate, threshold=None, arbiter=None, shadow="")

    # --- responses --------------------------------------------------------------------------------

    async def _respond(self, pieces: AsyncGenerator[str, None], progress: AnswerProgress, rag: AdaptiveRAG) -> Response:
        """Wait for the whole answer, and return it as a chat completion."""
        async with asyncio.timeout_at(progress.deadline), aclosing(pieces):
            text = "".join([piece async for piece in pieces])
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": _get_finish_reason(progress, rag)}
        usage = await _sum_usage(progress, rag)
        completion = {**_build_head(progress, rag, "chat.completion"), "choices": [choice], "usage": usage}
        return json_response({**completion, "knowgate": progress.trace.to_json()}, headers=progress.trace.headers)

    async def _respond_streaming(
        self, pieces: AsyncGenerator[str, None], progress: AnswerProgress, rag: AdaptiveRAG
    ) -> Response:
        """Return the answer as a stream. Wait for the first text, as the headers contain the decision."""
        try:
            async with asyncio.timeout_at(progress.deadline):
                first = await anext(pieces, "")
        except BaseException:
            await pieces.aclose()
            raise
        events = _format_chunks(first, pieces, progress, rag)
        return EventStreamResponse(events, progress.trace.headers, progress.deadline)


async def _sum_usage(progress: AnswerProgress, rag: AdaptiveRAG) -> dict[str, int]:
    """Return the field `usage`: the tokens of all calls to the LLM that the request needed."""
    usage = progress.usage or TokenUsage()
    if progress.usage is None and progress.answer is not None:
        if isinstance(rag.model, TokenizingModel):
            loop = asyncio.get_running_loop()  # only the thread of the model may use its tokenizer
            usage = await loop.run_in_executor(rag.model.workers, count_usage, progress.answer, rag)
        else:
            usage = count_usage(progress.answer, rag)
    return (usage + progress.rewrite_usage).to_json()


def _wants_usage(body: Mapping[str, Any]) -> bool:
    """Return whether the client wants the token counts (`usage`) at the end of a stream."""
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _list_ignored(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what has no effect on the answer: unknown fields, and system messages.

    System messages are ignored, because gates are measured with knowgate's own prompts only.
    """
    names = sorted(set(body) - SUPPORTED_FIELDS - HARMLESS_FIELDS)
    if any(message["role"] in ("system", "developer") for message in body["messages"]):
        names.insert(0, SYSTEM_MESSAGE)
    return tuple(name[:MAX_FIELD_NAME_CHARS] for name in names[:MAX_IGNORED_FIELDS])


async def _format_chunks(
    first: str, pieces: AsyncGenerator[str, None], progress: AnswerProgress, rag: AdaptiveRAG
) -> AsyncGenerator[bytes, None]:
    """Yield an answer as the server-sent events of a streamed chat completion."""
    head = _build_head(progress, rag, "chat.completion.chunk")

    def build_chunk(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}

    try:
        first_chunk = build_chunk({"role": "assistant", "content": first})
        yield format_event({**first_chunk, "knowgate": progress.trace.to_json()})
        async for piece in pieces:
            yield format_event(build_chunk({"content": piece}))
        last_chunk = build_chunk({}, _get_finish_reason(progress, rag))
        yield format_event({**last_chunk, "knowgate": progress.trace.to_json()})
        if progress.streams_usage:
            yield format_event({**head, "choices": [], "usage": await _sum_usage(progress, rag)})
        yield DONE_EVENT
    except ApiError as error:
        yield format_error_end(error)
    finally:
        await pieces.aclose()


def _build_head(progress: AnswerProgress, rag: AdaptiveRAG, kind: str) -> dict[str, Any]:
    """Return the fields that a chat completion and its chunks have in common."""
    return {"id": f"chatcmpl-{progress.trace.id}", "object": kind, "created": progress.created, "model": rag.model.name}


def _get_finish_reason(progress: AnswerProgress, rag: AdaptiveRAG) -> str:
    """Return "length" if the answer has the maximum number of tokens, otherwise "stop"."""
    answer = progress.answer
    if answer is None or DecisionNote.QUOTED in answer.decision.notes:
        return "stop"  # a quotation is a whole sentence
    return "length" if answer.n_tokens >= rag.max_tokens else "stop"
