"""Chats answered by an upstream: decide, look up where it must be, and send the application's own request on.

Three ways: `question` (the gate reads the question alone), `draft` (the upstream answers first; if the gate trusts
that, it is the reply and cost nothing more), `race` (as draft, but the search begins beside it).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.client_exceptions import ClientError
from starlette.datastructures import Headers
from starlette.responses import Response

from knowgate.pipeline import AdaptiveRAG
from knowgate.server.asking import Ungated, messages_of, question_of
from knowgate.server.bodies import read_flag
from knowgate.server.drafting import Drafted, draft_request, read_held_back, read_plain_draft, read_streamed_draft
from knowgate.server.events import Amending, StreamTooLong, lines
from knowgate.server.gatekeeper import Gatekeeper
from knowgate.server.options import ServeOptions
from knowgate.server.passages import with_passages
from knowgate.server.passing import passed, whole, with_record
from knowgate.server.policy import is_ours, policy_of
from knowgate.server.streaming import Streamed
from knowgate.server.trace import Trace
from knowgate.server.upstream import headers_of, unreachable
from knowgate.server.upstreams import Upstreams
from knowgate.server.weighing import weigh
from knowgate.types import Arbiter, Passage, Question

CHAT = "/chat/completions"
PIECE = "of this stream only the beginning was drafted; without stream both answers are weighed"
REFUSALS = (400, 404, 422, 501)  # how servers say that they give no log-probabilities


@dataclass
class Exchange:
    """One request on its way. sent: what goes up, None while the bytes that came can go as they are.

    draft: the answer without passages, where it was not good enough.
    """

    body: dict[str, Any]
    raw: bytes
    headers: Headers
    trace: Trace
    until: float
    sent: dict[str, Any] | None = None
    draft: Drafted | None = None

    @property
    def request(self) -> dict[str, Any]:
        return self.body if self.sent is None else self.sent

    @property
    def content(self) -> bytes:
        return self.raw if self.sent is None else json.dumps(self.sent).encode()

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))


class Forwarding:
    """Chats go this way when there is an upstream."""

    def __init__(self, upstream: Upstreams, keeper: Gatekeeper, options: ServeOptions):
        self.upstream = upstream
        self.keeper = keeper
        self.options = options

    async def chat(self, exchange: Exchange) -> Response:
        messages, policy = messages_of(exchange.body), policy_of(exchange.body)
        read_flag(exchange.body, "stream")
        rag = self.keeper.choose(self.keeper.assign(policy, exchange.body, exchange.trace))
        await self.name_model(exchange)
        asked = question_of(rag.model, messages)
        if isinstance(asked, Ungated):
            exchange.trace.ungated = asked.why
            return await self.answer(exchange)
        return await self._gated(exchange, rag, asked)

    async def name_model(self, exchange: Exchange) -> None:
        """The request as the upstream may see it: without our own field, with a model name of its own."""
        body = exchange.body
        if "knowgate" in body:
            exchange.sent = {key: value for key, value in body.items() if key != "knowgate"}
        if is_ours(body.get("model")):
            name = self.options.upstream_model or await self.upstream.default_model(exchange.headers)
            exchange.sent = {**exchange.request, "model": name}
        exchange.trace.model = str(exchange.request.get("model", ""))[:200]

    async def _gated(self, exchange: Exchange, rag: AdaptiveRAG, question: Question) -> Response:
        trace, search = exchange.trace, None
        trace.question = question.text
        trace.way = "question"
        trace.decision = self.keeper.foresee(rag, question)
        if trace.decision is None and not self.keeper.want_of(rag).is_nothing:
            trace.way = "race" if self.options.way == "race" else "draft"
            search = Search(self.keeper, rag, question) if trace.way == "race" else None
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
            trace.passages = await (search or Search(self.keeper, rag, question)).result(trace)
            if trace.passages:
                exchange.sent = with_passages(exchange.request, trace.passages, self.options.place)
                if exchange.draft is not None and rag.weighing is not None:
                    if exchange.draft.is_whole:
                        return await self._weighed(exchange, rag, question, exchange.draft, rag.weighing)
                    trace.unweighed = PIECE
        return await self.answer(exchange)

    async def _weighed(
        self, exchange: Exchange, rag: AdaptiveRAG, question: Question, draft: Drafted, arbiter: Arbiter
    ) -> Response:
        """The upstream's answer with passages, or its draft. A stream is held back as long as it may be replaced."""
        request = draft_request(exchange.request, arbiter)
        with exchange.trace.timed("answer"):
            reply = await self.upstream.send("POST", CHAT, json.dumps(request).encode(), exchange.headers)
        if reply.status != 200:
            return await whole(reply, exchange.trace)
        reading = read_held_back(reply, arbiter.lets_out) if exchange.is_streamed else read_plain_draft(reply)
        opened = await self._read(reply, exchange, reading, "answer")
        opened.hides_logprobs = request is not exchange.request and not exchange.body.get("logprobs")
        if exchange.is_streamed and not opened.ended:
            return self._given(opened, exchange)
        return self._given(await weigh(self.keeper, rag, question, draft, opened, exchange.trace), exchange)

    # --- the draft --------------------------------------------------------------------------------

    async def _draft(self, exchange: Exchange, rag: AdaptiveRAG, question: Question) -> Response | None:
        """The upstream's own answer, where it is the reply; None where it must be looked up."""
        request = draft_request(exchange.request, rag.bound)
        with exchange.trace.timed("draft"):
            reply = await self.upstream.send("POST", CHAT, json.dumps(request).encode(), exchange.headers)
        if reply.status != 200:
            if request == exchange.request or reply.status not in REFUSALS:
                return await whole(reply, exchange.trace)
            reply.close()
            self.keeper.give_up_gate(rag, exchange.trace, f"the upstream refuses to give a draft ({reply.status})")
            return None
        tokens = rag.bound.want.draft_tokens
        reading = read_streamed_draft(reply, tokens) if exchange.is_streamed else read_plain_draft(reply)
        drafted = await self._read(reply, exchange, reading, "draft")
        drafted.hides_logprobs = request is not exchange.request and not exchange.body.get("logprobs")
        if drafted.called_tool:
            exchange.trace.ungated = "the LLM called a tool"
        else:
            decision = await self.keeper.decide(rag, question, drafted.completion, exchange.trace)
            if decision.retrieve and rag.retriever is not None:
                if drafted.ended and rag.weighing is not None:
                    await drafted.read_on()
                drafted.close()
                exchange.draft = drafted
                return None
        return self._given(drafted, exchange)

    async def _read(
        self, reply: aiohttp.ClientResponse, exchange: Exchange, reading: Awaitable[Drafted], stage: str
    ) -> Drafted:
        try:
            with exchange.trace.timed(stage):
                return await reading
        except (ClientError, OSError, StreamTooLong) as error:
            raise unreachable(error) from None
        except BaseException:
            reply.close()
            raise

    def _given(self, drafted: Drafted, exchange: Exchange) -> Response:
        if drafted.rest is not None:
            amending = Amending(exchange.trace, hides_logprobs=drafted.hides_logprobs)
            pieces = passed(drafted.reply, amending, drafted.lines, drafted.rest)
            return Streamed(pieces, headers_of(drafted.reply, exchange.trace.headers), exchange.until)
        return Response(
            with_record(drafted.shown, exchange.trace), 200, headers_of(drafted.reply, exchange.trace.headers)
        )

    # --- the answer -------------------------------------------------------------------------------

    async def hand_on(self, exchange: Exchange, path: str) -> Response:
        """A request that nothing is decided about; its reply comes back as it is, but for headers."""
        await self.name_model(exchange)
        reply = await self.upstream.send("POST", path, exchange.content, exchange.headers)
        if reply.status == 200 and reply.content_type.startswith("text/event-stream"):
            pieces = passed(reply, None, [], lines(reply.content.iter_any()))
            return Streamed(pieces, headers_of(reply, exchange.trace.headers), exchange.until)
        return await whole(reply, exchange.trace, tells=False)

    async def answer(self, exchange: Exchange, path: str = CHAT) -> Response:
        """The upstream's reply to the request as it is now."""
        with exchange.trace.timed("answer"):
            reply = await self.upstream.send("POST", path, exchange.content, exchange.headers)
            if reply.status != 200 or not reply.content_type.startswith("text/event-stream"):
                return await whole(reply, exchange.trace)
        pieces = passed(reply, Amending(exchange.trace), [], lines(reply.content.iter_any()))
        return Streamed(pieces, headers_of(reply, exchange.trace.headers), exchange.until)


class Search:
    """A retrieval that has begun. What it has to say of itself is said only if it is used."""

    def __init__(self, keeper: Gatekeeper, rag: AdaptiveRAG, question: Question):
        self.own = Trace()
        self.task = asyncio.ensure_future(keeper.search(rag, question, self.own))

    async def result(self, trace: Trace) -> tuple[Passage, ...]:
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
