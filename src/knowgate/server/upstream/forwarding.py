"""Answers chats with the upstream: decides, retrieves if necessary, and forwards the request of the client.

There are three modes. In mode `question`, the gate reads only the question. In mode `draft`, the upstream first answers
without passages (the draft), and the gate reads this answer. If it decides to skip retrieval, the draft is the response.
Mode `race` is like `draft`, but the search already runs while the draft is generated.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import aiohttp
from aiohttp.client_exceptions import ClientError
from starlette.responses import Response

from knowgate.data.signals.confidence import is_empty_draft
from knowgate.gates.arbiters.arbitration import accepts_beginning, choose_answers
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.server import streaming
from knowgate.server.chat.gate_service import GateService
from knowgate.server.chat.request_formats import REQUEST_FORMATS, UngatedRequest, check_upstream_tools, extract_question
from knowgate.server.chat.request_options import is_knowgate_model, require_own_model
from knowgate.server.client_connection import EventStreamResponse
from knowgate.server.json_api import parse_request
from knowgate.server.options import ServeOptions
from knowgate.server.schemas import ChatRequest
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.server.upstream import draft as drafts
from knowgate.server.upstream.client import (
    HUGE_BYTES,
    LimitedResponse,
    UpstreamClient,
    build_response_headers,
    forward_stream,
    make_connection_error,
)
from knowgate.server.upstream.draft import UpstreamDraft
from knowgate.server.upstream.forwarded_request import BackgroundSearch, ForwardedRequest
from knowgate.server.upstream.response_body import (
    MAX_INLINE_MESSAGES,
    iter_chunks,
    make_logprobs_filter,
    parse_completion,
    read_chat,
    read_content,
    run_for_request,
    run_for_size,
)
from knowgate.types import AnswerPair, Arbiter, Gate, Passage, Question

CHAT_PATH, EVENT_STREAM = "/chat/completions", "text/event-stream"
PARTIAL_DRAFT_REASON = "the arbiter compares whole answers, but only the beginning of this stream was drafted"
WHOLE_DRAFT = 1 << 62  # number of tokens that no draft has
# Statuses with which servers refuse to return log-probabilities: OpenAI's reasoning models with 403, some servers with 500.
LOGPROBS_REFUSAL_STATUSES = (400, 403, 404, 422, 500, 501)


class UpstreamForwarder:
    """Forwarder of requests to the upstream LLM server. The gate decides whether passages are added."""

    def __init__(self, upstream: UpstreamClient, gate_service: GateService, options: ServeOptions):
        self.upstream = upstream
        self.gate_service = gate_service
        self.options = options

    async def chat(self, request: ForwardedRequest) -> Response:
        """Answer a chat request. A chat without a plain question is forwarded without a decision."""
        chat = await run_for_request(len(request.raw_body), partial(parse_request, ChatRequest, request.body))
        rag = await self.gate_service.prepare(request.body, request.trace)
        await self.set_model(request)
        rag = require_own_model(rag, request.trace.max_loss, request.trace.other_model)
        question: Question | UngatedRequest | None = check_upstream_tools(request.body)
        if question is None:
            question = await read_chat(len(request.raw_body), partial(extract_question, rag.model, chat.messages))
        if isinstance(question, UngatedRequest):
            request.trace.ungated_reason = question.reason
            return await self.forward(request)
        return await self._answer_question(request, rag, question)

    async def set_model(self, request: ForwardedRequest) -> None:
        """Prepare a request for the upstream: remove `knowgate`, and replace model names such as knowgate/always."""
        if "knowgate" in request.body:
            request.changed_body = {name: value for name, value in request.body.items() if name != "knowgate"}
        if is_knowgate_model(request.body.get("model")):
            model = self.options.upstream_model or await self.upstream.get_default_model(request.headers)
            request.changed_body = {**request.upstream_body, "model": model}  # without `knowgate`, too
        default_model = self.upstream.find_default_model(request.headers)
        self.gate_service.set_model(request.trace, str(request.upstream_body.get("model", "")), default_model)

    async def _answer_question(self, request: ForwardedRequest, rag: AdaptiveRAG, question: Question) -> Response:
        """Decide whether to retrieve, and answer with or without passages.

        A draft (an answer without passages) is requested first if the gate reads drafts, or if the gate has decided to
        retrieve and the arbiter compares the answer with a draft.
        """
        trace = request.trace
        search: BackgroundSearch | None = None
        trace.set_question(question)
        trace.way = "question"
        if await self._decide_without_draft(rag, question, trace):
            trace.way = "race" if self.options.way == "race" and trace.decision is None else "draft"
            # Search while the upstream generates the draft: in a race, or if the decision to retrieve is already made.
            if trace.way == "race" or trace.decision is not None:
                search = BackgroundSearch(self.gate_service, rag, question)
            needs_passages = False  # also after an error, so that the search is cancelled
            try:
                response = await self._answer_with_draft(request, rag, question)
                if response is not None:
                    return response
                needs_passages = True
            finally:
                if search is not None and not needs_passages:
                    search.cancel()
        if trace.decision is None or not trace.decision.retrieve or rag.retriever is None:
            return await self.forward(request)
        search = search or BackgroundSearch(self.gate_service, rag, question)
        return await self._answer_with_search(request, rag, question, search)

    # --- the draft --------------------------------------------------------------------------------

    async def _decide_without_draft(self, rag: AdaptiveRAG, question: Question, trace: RequestTrace) -> bool:
        """Decide by a rule or by the question alone, if possible. Return whether a draft is needed.

        A draft is an answer without passages. It is needed to decide, or for the arbiter after a decision to retrieve.
        """
        trace.decision = await self.gate_service.apply_rules(rag, question)
        if trace.decision is not None:
            return False
        reads_draft = not self.gate_service.get_signal_request(rag, trace).is_empty
        if reads_draft:
            return True
        decision = await self.gate_service.decide(rag, question, None, trace)
        # A stale gate was calibrated for another LLM, and so was its arbiter.
        is_stale = bool(self.gate_service.get_staleness(rag, trace.other_model))
        allows_draft = self.options.way != "question" and not is_stale
        return decision.retrieve and allows_draft and drafts.arbiter_makes_drafts(rag)

    async def _answer_with_draft(
        self, request: ForwardedRequest, rag: AdaptiveRAG, question: Question
    ) -> Response | None:
        """Request a draft (answer without passages). Send the draft unless the gate decides to retrieve.

        Returns:
            The response: the draft if the gate skips retrieval or the LLM called a tool, or an error of the upstream.
            None if passages must be retrieved. Then `request.draft` is the draft, unless it is empty or was refused.
        """
        trace = request.trace
        reader: Gate | Arbiter = rag.bound_gate
        token_count = rag.bound_gate.request.draft_tokens
        if trace.decision is not None:  # the decision to retrieve is already made, so only the arbiter reads the draft
            reader = rag.bound_arbiter or reader
            token_count = WHOLE_DRAFT
        read_stream = partial(drafts.read_first_tokens, count=token_count)
        draft = await self.request_answer(request, reader, "draft", read_stream)
        if not isinstance(draft, UpstreamDraft):
            return await self._handle_refused_draft(request, rag, reader, draft)
        if draft.calls_tool:
            trace.ungated_reason = "the LLM called a tool"
            return await _make_draft_response(self.upstream, draft, request)
        decision = trace.decision or await self.gate_service.decide(rag, question, draft.completion, trace)
        if not decision.retrieve or rag.retriever is None:
            return await _make_draft_response(self.upstream, draft, request)
        await self._keep_draft(request, draft, rag.bound_arbiter)
        return None

    async def _keep_draft(self, request: ForwardedRequest, draft: UpstreamDraft, arbiter: Arbiter | None) -> None:
        """Keep a draft that may still be sent after the search. An empty draft is dropped after counting its tokens."""
        if draft.completion is not None and is_empty_draft(draft.completion):
            await _measure_draft(request, draft)
            draft.response.close()
            return
        if draft.has_ended and arbiter is not None:  # the text is complete, so the arbiter can compare it later
            await draft.read_to_end()
        request.draft = draft

    async def _handle_refused_draft(
        self, request: ForwardedRequest, rag: AdaptiveRAG, reader: Gate | Arbiter, response: aiohttp.ClientResponse
    ) -> Response | None:
        """Forward the upstream's error for a draft. If it only refused log-probabilities, bypass the gate and return None."""
        adds_logprobs = drafts.build_draft_request(request.upstream_body, reader) != request.upstream_body
        if not adds_logprobs or response.status not in LOGPROBS_REFUSAL_STATUSES:
            return await forward_response(self.upstream, response, request.trace)
        response.close()
        if request.trace.decision is None:  # otherwise, the draft was for the arbiter only
            reason = f"the upstream refused the draft with log-probabilities (status {response.status})"
            self.gate_service.bypass_failed_gate(rag, request.trace, reason)
        return None

    # --- the answer with passages -----------------------------------------------------------------

    async def _answer_with_search(
        self, request: ForwardedRequest, rag: AdaptiveRAG, question: Question, search: BackgroundSearch
    ) -> Response:
        """Wait for the passages, and answer with them. After an empty search, answer without passages."""
        try:
            request.trace.passages = await search.get_passages(request.trace)
        except BaseException:
            _close_draft(request)
            raise
        if not request.trace.passages:
            return await self._answer_without_passages(request)
        if request.draft is not None:
            await _measure_draft(request, request.draft)
        _close_draft(request)
        return await self._answer_with_passages(request, rag, question)

    async def _answer_without_passages(self, request: ForwardedRequest) -> Response:
        """Answer after an empty search, with the draft if possible."""
        request.trace.note_nothing_found()
        if request.draft is not None:
            if request.draft.completion is not None:
                return await _make_draft_response(self.upstream, request.draft, request)
            await _measure_draft(request, request.draft)
        _close_draft(request)
        return await self.forward(request)

    async def _answer_with_passages(self, request: ForwardedRequest, rag: AdaptiveRAG, question: Question) -> Response:
        """Answer the request with its passages. The arbiter (it picks an answer) needs a complete draft."""
        size = sum(len(passage.text) for passage in request.trace.passages)
        await run_for_size(size, partial(self.insert_passages, request, request.trace.passages), MAX_INLINE_MESSAGES)
        if request.draft is None or rag.bound_arbiter is None:
            return await self.forward(request)
        if not request.draft.is_complete:
            request.trace.arbitration_gap = PARTIAL_DRAFT_REASON
            return await self.forward(request)
        return await self._answer_with_arbiter(request, rag.bound_arbiter, question, request.draft)

    async def _answer_with_arbiter(
        self, request: ForwardedRequest, arbiter: Arbiter, question: Question, draft: UpstreamDraft
    ) -> Response:
        """Request the answer with passages. Send this answer or the draft, whichever the arbiter chooses."""
        read_stream = partial(drafts.read_until, is_enough=partial(accepts_beginning, arbiter))
        answer = await self.request_answer(request, arbiter, "answer", read_stream)
        if not isinstance(answer, UpstreamDraft):
            return await forward_response(self.upstream, answer, request.trace)
        # A stream is read to the end of its text, unless the arbiter accepts its beginning.
        if answer.remaining_lines is not None and not answer.has_ended:
            beginning = answer.completion.text[: drafts.MAX_BEGINNING_CHARS] if answer.completion is not None else ""
            if accepts_beginning(arbiter, beginning):  # not so for a tool call or a cut stream
                request.trace.accepting_arbiter = arbiter.name
            return await _make_draft_response(self.upstream, answer, request)
        chosen = await self._arbitrate(arbiter, question, draft, answer, request.trace)
        if chosen is draft:  # the response reports the tokens of the draft, plus those of the discarded answer
            request.trace.extra_usage = await drafts.measure_draft(answer, request.upstream_body, len(request.raw_body))
        return await _make_draft_response(self.upstream, chosen, request)

    async def _arbitrate(
        self, arbiter: Arbiter, question: Question, draft: UpstreamDraft, answer: UpstreamDraft, trace: RequestTrace
    ) -> UpstreamDraft:
        """Return the arbiter's choice: the draft or the answer with passages. After a failure, return the latter."""
        if draft.completion is None or answer.completion is None or answer.calls_tool:
            return answer
        pair = AnswerPair(question, draft.completion, answer.completion, trace.passages)
        try:
            with trace.measure("arbiter"):
                (trace.choice,) = await self.gate_service.run_in_gate_thread(lambda: choose_answers(arbiter, [pair]))
        except Exception as error:  # noqa: BLE001 - whatever the arbiter raises, there is an answer
            self.gate_service.bypass_arbiter(trace, error)
            return answer
        return draft if trace.choice.is_closed_book else answer

    # --- forwarding -------------------------------------------------------------------------------

    async def request_answer(
        self,
        request: ForwardedRequest,
        reader: Gate | Arbiter,
        stage: str,
        read_stream: Callable[[aiohttp.ClientResponse], Awaitable[UpstreamDraft]] = drafts.read_draft,
    ) -> UpstreamDraft | aiohttp.ClientResponse:
        """Request an answer from the upstream, with the signals for the gate or arbiter.

        Args:
            request: The client's request.
            reader: The gate or arbiter that reads the answer.
            stage: Name of the stage in the trace.
            read_stream: Function that reads as much of a streamed answer as the reader needs. Not needed if the request
                does not ask for a stream.

        Returns:
            The answer, or the HTTP response if its status is not 200.

        Raises:
            ApiError: The connection failed.
        """
        body = drafts.build_draft_request(request.upstream_body, reader)
        content = await run_for_request(len(request.raw_body), lambda: json.dumps(body).encode())
        with request.trace.measure(stage):
            response = await self._send(request, CHAT_PATH, content)
        if response.status != 200:
            return response
        try:
            with request.trace.measure(stage):
                is_stream = request.is_streaming and response.content_type == EVENT_STREAM
                read = read_stream if is_stream else drafts.read_draft
                answer = await read(response)
        except (ClientError, OSError, streaming.InvalidResponse) as error:
            response.close()
            raise self.upstream.record_body_error(error, response) from None
        except BaseException:
            response.close()
            raise
        self.upstream.breaker.record_success()
        if body is not request.upstream_body:  # log-probabilities were added to it
            answer.hide_logprobs = make_logprobs_filter(request.body)
        return answer

    async def _send(self, request: ForwardedRequest, path: str, content: bytes) -> aiohttp.ClientResponse:
        """Send a request to the upstream. At the latest, its connection is closed when the client's request ends."""
        response = await self.upstream.send("POST", path, content, request.headers)
        if isinstance(response, LimitedResponse):
            response.wait_for_place = partial(_take_places, self.upstream, request.trace)
        request.trace.on_end.append(response.close)
        return response

    def insert_passages(self, request: ForwardedRequest, passages: Sequence[Passage], path: str = CHAT_PATH) -> None:
        """Insert passages into the request body. `path` is the API path."""
        insert = REQUEST_FORMATS[path].insert_passages
        request.changed_body = insert(request.upstream_body, passages, self.options.place, cites=self.options.cite)

    async def forward(self, request: ForwardedRequest, path: str = CHAT_PATH) -> Response:
        """Forward the request, and add the `knowgate` object to the response."""
        with request.trace.measure("answer"):
            response = await self._send(request, path, await request.write_content())
            if response.status != 200 or response.content_type != EVENT_STREAM:
                return await forward_response(self.upstream, response, request.trace)
        return _make_stream_response(self.upstream, response, request, streaming.StreamAnnotator(request.trace))

    async def pass_through(self, request: ForwardedRequest, path: str) -> Response:
        """Forward a request without a decision, such as one for embeddings. The response body stays unchanged."""
        await self.set_model(request)
        response = await self._send(request, path, await request.write_content())
        if response.status == 200 and response.content_type == EVENT_STREAM:
            return _make_stream_response(self.upstream, response, request, None)
        return await forward_response(self.upstream, response, request.trace, annotates_body=False)


async def forward_response(
    upstream: UpstreamClient, response: aiohttp.ClientResponse, trace: RequestTrace, *, annotates_body: bool = True
) -> Response:
    """Return a response of the upstream that is not a stream to the client, with the trace in its headers.

    Raises:
        ApiError: The connection failed.
    """
    try:
        content = await read_content(response)
        upstream.breaker.record_success()
        if response.status == 200 and annotates_body:
            await parse_completion(content)  # raises an error for an invalid response
            content = await run_for_size(len(content), lambda: drafts.annotate_body(content, trace))
        elif response.status != 200:
            content = upstream.redact_login(content)
    except (ClientError, OSError, streaming.InvalidResponse) as error:
        raise upstream.record_body_error(error, response) from None
    return Response(content, response.status, build_response_headers(response, trace.headers))


async def _take_places(upstream: UpstreamClient, trace: RequestTrace, size: int) -> None:
    """Wait for a place among the requests with large responses in memory, unless this request has one until its end.

    A response of more than HUGE_BYTES also needs one among the huge ones.
    """
    locks = [upstream.large_responses, upstream.huge_responses] if size > HUGE_BYTES else [upstream.large_responses]
    for lock in locks:
        if lock.release not in trace.on_end:
            await lock.acquire()
            trace.on_end.append(lock.release)


async def _measure_draft(request: ForwardedRequest, draft: UpstreamDraft) -> None:
    """Record the tokens of a draft in the trace. They are extra tokens unless an arbiter still chooses the draft."""
    request.trace.draft_usage = await drafts.measure_draft(draft, request.upstream_body, len(request.raw_body))
    request.trace.extra_usage = request.trace.draft_usage


def _close_draft(request: ForwardedRequest) -> None:
    """Close the connection of a draft, if there is one. The rest of the draft is not read."""
    if request.draft is not None:
        request.draft.response.close()


async def _make_draft_response(upstream: UpstreamClient, draft: UpstreamDraft, request: ForwardedRequest) -> Response:
    """Return an answer of the upstream as the response. Remaining lines of a stream are forwarded on arrival.

    Raises:
        ApiError: 502 if the draft is not a valid response.
    """
    headers = build_response_headers(draft.response, request.trace.headers)
    if draft.remaining_lines is not None:
        annotator = streaming.StreamAnnotator(request.trace, hide_logprobs=draft.hide_logprobs)
        events = forward_stream(upstream, draft.response, annotator, draft.lines, draft.remaining_lines)
        return EventStreamResponse(events, headers, request.deadline)
    if draft.body is None:
        try:
            await parse_completion(draft.content)  # raises the error again that made the body unreadable
        except streaming.InvalidResponse as error:
            raise make_connection_error(error) from None
    content = await run_for_size(
        len(draft.content), lambda: drafts.annotate_body(draft.get_client_content(), request.trace)
    )
    return Response(content, 200, headers)


def _make_stream_response(
    upstream: UpstreamClient,
    response: aiohttp.ClientResponse,
    request: ForwardedRequest,
    annotator: streaming.StreamAnnotator | None,
) -> Response:
    """Return a streaming response of the upstream as the response to the client."""
    lines = streaming.read_event_lines(iter_chunks(response))
    events = forward_stream(upstream, response, annotator, [], lines)  # [] because no line has been read yet
    headers = build_response_headers(response, request.trace.headers)
    return EventStreamResponse(events, headers, request.deadline)
