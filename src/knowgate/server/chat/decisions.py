"""`POST /v1/decide`: decisions alone, for one question, several, or the last one of a chat. Nothing is retrieved."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response

from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import decision_record
from knowgate.server.chat.gate_service import GateService
from knowgate.server.chat.request_formats import REQUEST_FORMATS, UngatedRequest, extract_question, read_messages
from knowgate.server.chat.request_options import read_request_options
from knowgate.server.json_api import ApiError
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.server.upstream.draft import build_draft_request, read_draft
from knowgate.server.upstream.forwarding import CHAT_PATH, BackgroundSearch, ForwardedRequest, UpstreamForwarder
from knowgate.types import Completion, Decision, Question

MAX_QUESTIONS = 256  # questions of one request


async def decide_questions(
    keeper: GateService,
    forwarding: UpstreamForwarder | None,
    body: Mapping[str, Any],
    headers: Headers,
    trace: RequestTrace,
) -> dict[str, Any]:
    """One record for `question` or `messages`, a list of them for `questions`."""
    rag = keeper.choose(keeper.assign(read_request_options(body), body, trace))
    questions = await asyncio.to_thread(_questions, rag, body)
    deciding = QuestionDecider(keeper, forwarding, rag, headers)
    decided = [await deciding.decide(question, trace) for question in questions]
    records = [decision_record(decision) for decision in decided]
    known = {"id": trace.id, "degraded": sorted(set(trace.degraded)), "milliseconds": trace.milliseconds}
    return {**known, "decisions": records} if "questions" in body else {**known, **records[0]}


class QuestionDecider:
    """Asks the upstream for drafts where the gate reads them."""

    def __init__(self, keeper: GateService, forwarding: UpstreamForwarder | None, rag: AdaptiveRAG, headers: Headers):
        self.keeper = keeper
        self.forwarding = forwarding
        self.rag = rag
        self.headers = headers

    async def decide(self, question: Question, trace: RequestTrace) -> Decision:
        ruled = self.keeper.foresee(self.rag, question)
        if ruled is not None:
            return ruled
        draft = None
        if self.forwarding is not None and not self.keeper.want_of(self.rag).is_empty:
            draft = await self._draft(self.forwarding, question, trace)
        return await self.keeper.decide(self.rag, question, draft, trace)

    async def _draft(self, forwarding: UpstreamForwarder, question: Question, trace: RequestTrace) -> Completion | None:
        """As much of an answer as the gate reads; None where the upstream refuses."""
        model = forwarding.options.upstream_model or await forwarding.upstream.default_model(self.headers)
        messages = [{"role": "user", "content": question.text}]
        wanted = {"model": model, "messages": messages, "max_tokens": self.rag.bound_gate.request.draft_tokens}
        content = json.dumps(build_draft_request(wanted, self.rag.bound_gate)).encode()
        with trace.timed("draft"):
            reply = await forwarding.upstream.send("POST", CHAT_PATH, content, self.headers)
            return (await read_draft(reply)).completion if reply.status == 200 else None


def _questions(rag: AdaptiveRAG, body: Mapping[str, Any]) -> list[Question]:
    given = [name for name in ("question", "questions", "messages") if name in body]
    if len(given) != 1:
        raise ApiError(400, "give one of 'question', 'questions' and 'messages'.", "invalid_question")
    if given == ["messages"]:
        asked = extract_question(rag.model, read_messages(body))
        if isinstance(asked, UngatedRequest):
            raise ApiError(400, f"there is nothing to decide: {asked.why}.", "not_a_question")
        return [asked]
    listed = body["questions"] if given == ["questions"] else [body["question"]]
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_QUESTIONS:
        raise ApiError(400, f"'questions' must be a list of 1 to {MAX_QUESTIONS} texts.", "invalid_question")
    if not all(isinstance(text, str) and text.strip() for text in listed):
        raise ApiError(400, "a question must be a text that says something.", "invalid_question")
    return [Question(text) for text in listed]


async def answer_prompt(forwarding: UpstreamForwarder, exchange: ForwardedRequest, path: str) -> Response:
    """path: of the upstream's address, /completions or /responses."""
    keeper, trace, form = forwarding.keeper, exchange.trace, REQUEST_FORMATS[path]
    rag = keeper.choose(keeper.assign(read_request_options(exchange.body), exchange.body, trace))
    asked = form.question(rag.model, exchange.body)
    if isinstance(asked, UngatedRequest):
        trace.ungated = asked.why
        return await forwarding.hand_on(exchange, path)
    await forwarding.name_model(exchange)
    trace.question, trace.way = asked.text, "question"
    trace.decision = await QuestionDecider(keeper, forwarding, rag, exchange.headers).decide(asked, trace)
    if trace.decision.retrieve and rag.retriever is not None:
        trace.passages = await BackgroundSearch(keeper, rag, asked).result(trace)
        if trace.passages:
            exchange.sent = form.with_passages(exchange.request, trace.passages, forwarding.options.place)
    return await forwarding.answer(exchange, path)
