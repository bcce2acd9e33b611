"""An upstream's reply on its way to the client, whole or event by event, with what we have to say put into it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.client_exceptions import ClientError
from starlette.datastructures import Headers
from starlette.responses import Response

from knowgate.gates.arbiters.arbitration import choose_answers
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.server.chat.gate_service import GateService
from knowgate.server.chat.request_formats import UngatedRequest, extract_question, insert_passages, read_messages
from knowgate.server.chat.request_options import is_knowgate_model, read_request_options
from knowgate.server.json_api import ApiError, read_bool
from knowgate.server.options import ServeOptions
from knowgate.server.streaming import (
    EVENT_TERMINATORS,
    EventStreamResponse,
    LineTooLong,
    StreamAnnotator,
    chain_lines,
    format_event,
    split_lines,
)
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.server.upstream.client import UpstreamPool, build_response_headers, make_unreachable_error
from knowgate.server.upstream.draft import (
    UpstreamDraft,
    build_draft_request,
    read_draft,
    read_streamed_draft,
    read_until_released,
)
from knowgate.types import AnswerPair, Arbiter, Passage, Question


async def forward_response(reply: aiohttp.ClientResponse, trace: RequestTrace, *, tells: bool = True) -> Response:
    """A reply in one piece: good ones with our record, errors just as they came. tells: not in its body, if False."""
    async with reply:
        try:
            content = await reply.read()
        except (ClientError, OSError) as error:
            raise make_unreachable_error(error) from None
    content = annotate_body(content, trace) if reply.status == 200 and tells else content
    return Response(content, reply.status, build_response_headers(reply, trace.headers))


def annotate_body(content: bytes, trace: RequestTrace) -> bytes:
    """A JSON object with one field more; its own bytes stay as they are."""
    text = content.strip()
    if not (text.startswith(b"{") and text.endswith(b"}")):
        return content
    comma = b"," if text[1:-1].strip() else b""
    return text[:-1] + comma + b'"knowgate":' + json.dumps(trace.record, separators=(",", ":")).encode() + b"}"


async def forward_stream(
    reply: aiohttp.ClientResponse,
    amending: StreamAnnotator | None,
    begun: list[bytes],
    rest: AsyncGenerator[bytes, None],
) -> AsyncGenerator[bytes, None]:
    """The upstream's stream, amended, event by event; when nobody listens any more the upstream is hung up on."""
    waiting = b""
    try:
        async for line in chain_lines(begun, rest):
            waiting += amending.amend(line) if amending else line
            if line in EVENT_TERMINATORS:
                yield waiting
                waiting = b""
        if waiting:
            yield waiting
    except (ClientError, OSError, LineTooLong):
        yield format_event(
            ApiError(502, "the upstream broke off in the middle of its answer.", "upstream_broke_off").record
        )
    finally:
        await rest.aclose()
        reply.close()


async def arbitrate(
    keeper: GateService,
    rag: AdaptiveRAG,
    question: Question,
    draft: UpstreamDraft,
    opened: UpstreamDraft,
    trace: RequestTrace,
) -> UpstreamDraft:
    """Which of the two is the reply."""
    arbiter = rag.bound_arbiter
    if arbiter is None or draft.completion is None or opened.completion is None or opened.called_tool:
        return opened
    both = AnswerPair(question, draft.completion, opened.completion, trace.passages)
    try:
        with trace.timed("arbiter"):
            (trace.choice,) = await keeper.apart(lambda: choose_answers(arbiter, [both]))
    except Exception as error:  # noqa: BLE001 - whatever an arbiter does, there is an answer to give
        keeper.give_up("arbiter", trace, error)
        return opened
    return draft if trace.choice.is_closed_book else opened


CHAT_PATH = "/chat/completions"
PARTIAL_DRAFT_REASON = "of this stream only the beginning was drafted; without stream both answers are weighed"
LOGPROBS_REFUSAL_STATUSES = (400, 404, 422, 501)  # how servers say that they give no log-probabilities


@dataclass
class ForwardedRequest:
    """One request on its way. sent: what goes up, None while the bytes that came can go as they are.

    draft: the answer without passages, where it was not good enough.
    """

    body: dict[str, Any]
    raw: bytes
    headers: Headers
    trace: RequestTrace
    until: float
    sent: dict[str, Any] | None = None
    draft: UpstreamDraft | None = None

    @property
    def request(self) -> dict[str, Any]:
        return self.body if self.sent is None else self.sent

    @property
    def content(self) -> bytes:
        return self.raw if self.sent is None else json.dumps(self.sent).encode()

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))


class UpstreamForwarder:
    """Chats go this way when there is an upstream."""

    def __init__(self, upstream: UpstreamPool, keeper: GateService, options: ServeOptions):
        self.upstream = upstream
        self.keeper = keeper
        self.options = options

    async def chat(self, exchange: ForwardedRequest) -> Response:
        messages, policy = read_messages(exchange.body), read_request_options(exchange.body)
        read_bool(exchange.body, "stream")
        rag = self.keeper.choose(self.keeper.assign(policy, exchange.body, exchange.trace))
        await self.name_model(exchange)
        asked = extract_question(rag.model, messages)
        if isinstance(asked, UngatedRequest):
            exchange.trace.ungated = asked.why
            return await self.answer(exchange)
        return await self._gated(exchange, rag, asked)

    async def name_model(self, exchange: ForwardedRequest) -> None:
        """The request as the upstream may see it: without our own field, with a model name of its own."""
        body = exchange.body
        if "knowgate" in body:
            exchange.sent = {key: value for key, value in body.items() if key != "knowgate"}
        if is_knowgate_model(body.get("model")):
            name = self.options.upstream_model or await self.upstream.default_model(exchange.headers)
            exchange.sent = {**exchange.request, "model": name}
        exchange.trace.model = str(exchange.request.get("model", ""))[:200]

    async def _gated(self, exchange: ForwardedRequest, rag: AdaptiveRAG, question: Question) -> Response:
        trace, search = exchange.trace, None
        trace.question = question.text
        trace.way = "question"
        trace.decision = self.keeper.foresee(rag, question)
        if trace.decision is None and not self.keeper.want_of(rag).is_empty:
            trace.way = "race" if self.options.way == "race" else "draft"
            search = BackgroundSearch(self.keeper, rag, question) if trace.way == "race" else None
            try:
                drafted = await self._draft(exchange, rag, question)
            except BaseException:
                if search is not None:
                    search.cancel()
                raise
            if drafted is not None:
                if search is not None:
                    search.cancel()
                return drafted
        elif trace.decision is None:
            await self.keeper.decide(rag, question, None, trace)
        if trace.decision is not None and trace.decision.retrieve and rag.retriever is not None:
            trace.passages = await (search or BackgroundSearch(self.keeper, rag, question)).result(trace)
            if trace.passages:
                exchange.sent = insert_passages(exchange.request, trace.passages, self.options.place)
                if exchange.draft is not None and rag.bound_arbiter is not None:
                    if exchange.draft.is_whole:
                        return await self._weighed(exchange, rag, question, exchange.draft, rag.bound_arbiter)
                    trace.unweighed = PARTIAL_DRAFT_REASON
        return await self.answer(exchange)

    async def _weighed(
        self, exchange: ForwardedRequest, rag: AdaptiveRAG, question: Question, draft: UpstreamDraft, arbiter: Arbiter
    ) -> Response:
        """The upstream's answer with passages, or its draft. A stream is held back as long as it may be replaced."""
        request = build_draft_request(exchange.request, arbiter)
        with exchange.trace.timed("answer"):
            reply = await self.upstream.send("POST", CHAT_PATH, json.dumps(request).encode(), exchange.headers)
        if reply.status != 200:
            return await forward_response(reply, exchange.trace)
        reading = read_until_released(reply, arbiter.accepts_beginning) if exchange.is_streamed else read_draft(reply)
        opened = await self._read(reply, exchange, reading, "answer")
        opened.hides_logprobs = request is not exchange.request and not exchange.body.get("logprobs")
        if exchange.is_streamed and not opened.ended:
            return self._given(opened, exchange)
        return self._given(await arbitrate(self.keeper, rag, question, draft, opened, exchange.trace), exchange)

    # --- the draft --------------------------------------------------------------------------------

    async def _draft(self, exchange: ForwardedRequest, rag: AdaptiveRAG, question: Question) -> Response | None:
        """The upstream's own answer, where it is the reply; None where it must be looked up."""
        request = build_draft_request(exchange.request, rag.bound_gate)
        with exchange.trace.timed("draft"):
            reply = await self.upstream.send("POST", CHAT_PATH, json.dumps(request).encode(), exchange.headers)
        if reply.status != 200:
            if request == exchange.request or reply.status not in LOGPROBS_REFUSAL_STATUSES:
                return await forward_response(reply, exchange.trace)
            reply.close()
            self.keeper.give_up_gate(rag, exchange.trace, f"the upstream refuses to give a draft ({reply.status})")
            return None
        tokens = rag.bound_gate.request.draft_tokens
        reading = read_streamed_draft(reply, tokens) if exchange.is_streamed else read_draft(reply)
        drafted = await self._read(reply, exchange, reading, "draft")
        drafted.hides_logprobs = request is not exchange.request and not exchange.body.get("logprobs")
        if drafted.called_tool:
            exchange.trace.ungated = "the LLM called a tool"
        else:
            decision = await self.keeper.decide(rag, question, drafted.completion, exchange.trace)
            if decision.retrieve and rag.retriever is not None:
                if drafted.ended and rag.bound_arbiter is not None:
                    await drafted.read_on()
                drafted.close()
                exchange.draft = drafted
                return None
        return self._given(drafted, exchange)

    async def _read(
        self, reply: aiohttp.ClientResponse, exchange: ForwardedRequest, reading: Awaitable[UpstreamDraft], stage: str
    ) -> UpstreamDraft:
        try:
            with exchange.trace.timed(stage):
                return await reading
        except (ClientError, OSError, LineTooLong) as error:
            raise make_unreachable_error(error) from None
        except BaseException:
            reply.close()
            raise

    def _given(self, drafted: UpstreamDraft, exchange: ForwardedRequest) -> Response:
        if drafted.rest is not None:
            amending = StreamAnnotator(exchange.trace, hides_logprobs=drafted.hides_logprobs)
            pieces = forward_stream(drafted.reply, amending, drafted.lines, drafted.rest)
            return EventStreamResponse(
                pieces, build_response_headers(drafted.reply, exchange.trace.headers), exchange.until
            )
        return Response(
            annotate_body(drafted.shown, exchange.trace),
            200,
            build_response_headers(drafted.reply, exchange.trace.headers),
        )

    # --- the answer -------------------------------------------------------------------------------

    async def hand_on(self, exchange: ForwardedRequest, path: str) -> Response:
        """A request that nothing is decided about; its reply comes back as it is, but for headers."""
        await self.name_model(exchange)
        reply = await self.upstream.send("POST", path, exchange.content, exchange.headers)
        if reply.status == 200 and reply.content_type.startswith("text/event-stream"):
            pieces = forward_stream(reply, None, [], split_lines(reply.content.iter_any()))
            return EventStreamResponse(pieces, build_response_headers(reply, exchange.trace.headers), exchange.until)
        return await forward_response(reply, exchange.trace, tells=False)

    async def answer(self, exchange: ForwardedRequest, path: str = CHAT_PATH) -> Response:
        """The upstream's reply to the request as it is now."""
        with exchange.trace.timed("answer"):
            reply = await self.upstream.send("POST", path, exchange.content, exchange.headers)
            if reply.status != 200 or not reply.content_type.startswith("text/event-stream"):
                return await forward_response(reply, exchange.trace)
        pieces = forward_stream(reply, StreamAnnotator(exchange.trace), [], split_lines(reply.content.iter_any()))
        return EventStreamResponse(pieces, build_response_headers(reply, exchange.trace.headers), exchange.until)


class BackgroundSearch:
    """A retrieval that has begun. What it has to say of itself is said only if it is used."""

    def __init__(self, keeper: GateService, rag: AdaptiveRAG, question: Question):
        self.own = RequestTrace()
        self.task = asyncio.ensure_future(keeper.search(rag, question, self.own))

    async def result(self, trace: RequestTrace) -> tuple[Passage, ...]:
        try:
            return await self.task
        finally:
            self.cancel()
            trace.degraded += self.own.degraded
            trace.milliseconds |= self.own.milliseconds
            trace.stages += self.own.stages

    def cancel(self) -> None:
        self.task.cancel()
        self.task.add_done_callback(
            lambda task: task.cancelled() or task.exception()
        )  # looked at, so not complained of
