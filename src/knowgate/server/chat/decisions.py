"""Decides on the questions of POST /v1/decide, /v1/completions and /v1/responses, and orders the documents of /v1/rerank."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from aiohttp import ClientError
from starlette.datastructures import Headers
from starlette.responses import Response

from knowgate.data.history.entries import MAX_QUESTION_CHARS, get_max_normalized_length, is_too_long
from knowgate.evaluation.server_log import SEPARATE_DRAFT
from knowgate.gates.rules.rule_set import LIST_RULES_SECONDS, PatternTimeBudget
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.execution import run_in_model_thread
from knowgate.retrieval.rerankers import rerank
from knowgate.retrieval.rerankers.remote import RemoteReranker
from knowgate.server.chat.gate_service import GateService
from knowgate.server.chat.local_pipeline import GuardedStageRunner, TracedQuestion
from knowgate.server.chat.request_formats import (
    REQUEST_FORMATS,
    UngatedRequest,
    check_upstream_tools,
    extract_question,
    may_be_follow_up,
)
from knowgate.server.chat.request_options import (
    MODEL_PREFIX,
    SELECTABLE_GATES,
    RequestOptions,
    is_knowgate_model,
    require_own_model,
)
from knowgate.server.json_api import ApiError, dump_json, parse_request
from knowgate.server.load_limits import get_reason, limit_time
from knowgate.server.schemas import TOO_LONG, DecideRequest, DecideResponse, RerankRequest, RerankResponse
from knowgate.server.streaming import InvalidResponse
from knowgate.server.telemetry.trace import RequestTrace, RewriteMeter, describe_decision
from knowgate.server.upstream.draft import UpstreamDraft, measure_draft
from knowgate.server.upstream.forwarded_request import BackgroundSearch, ForwardedRequest
from knowgate.server.upstream.forwarding import UpstreamForwarder
from knowgate.server.upstream.response_body import MAX_INLINE_MESSAGES, read_chat, read_content, run_for_size
from knowgate.types import Completion, Decision, Model, Passage, Question, Reranker

# After as many documents, waiting searches run. A reranker in this process may need seconds for long ones on a CPU.
BATCH_DOCUMENTS, LOCAL_BATCH_CHARS = 32, 4_000
MAX_ERROR_BYTES = 1 << 16  # of a refused draft
MAX_DOCUMENT_CHARS = 50_000  # rerankers read less of a document, so the rest is not passed on


async def decide_questions(
    gate_service: GateService,
    forwarder: UpstreamForwarder | None,
    body: Mapping[str, Any],
    body_bytes: int,
    headers: Headers,
    trace: RequestTrace,
) -> DecideResponse:
    """Answer POST /v1/decide with a decision per question. No passages are retrieved.

    Args:
        gate_service: Decides whether questions need retrieval.
        forwarder: Forwarder to the upstream, which runs the LLM. None if the LLM runs in this process.
        body: Body of the request.
        body_bytes: Its size.
        headers: Headers of the request.
        trace: Record of how this request is processed.
    """
    request = parse_request(DecideRequest, body)
    rag = await gate_service.prepare(body, trace)
    if forwarder is not None and request.model is not None and not is_knowgate_model(request.model):
        gate_service.set_model(trace, request.model, forwarder.upstream.find_default_model(headers))
        rag = require_own_model(rag, trace.max_loss, trace.other_model)
    await _check_lengths(gate_service, request.questions or ())
    model = cast(Model, RewriteMeter(rag.model))  # not a full model, but rewriting follow-ups only calls `generate`
    if forwarder is None and may_be_follow_up(request.messages or ()):
        questions = await run_in_model_thread(rag.model, lambda: _read_questions(model, request))
    else:
        questions = await read_chat(body_bytes, lambda: _read_questions(model, request))
    records = []
    shared_budget = PatternTimeBudget(LIST_RULES_SECONDS)
    for question in questions:
        decision = await _decide_question(gate_service, forwarder, rag, question, headers, trace, shared_budget)
        records.append(describe_decision(decision))
        if request.questions is not None:
            trace.decision = None  # the log and the figures have single decisions only
        await asyncio.sleep(0)  # many long questions take a while, so let other requests run
    if request.questions is not None:
        decision_fields: dict[str, Any] = {"decisions": records}
    else:
        trace.set_question(questions[0])
        decision_fields = records[0]
    degraded = sorted(set(trace.degraded))
    return DecideResponse(id=trace.id, degraded=degraded, milliseconds=trace.milliseconds, **decision_fields)


def list_selectable_gates(gate_service: GateService) -> list[str]:
    """Return the selectable gates that work with the LLM of this server."""
    names = []
    for name in SELECTABLE_GATES:
        with suppress(ApiError):
            gate_service.select_pipeline(RequestOptions(gate=name))
            names.append(name)
    return names


async def write_model_list(gate_service: GateService, forwarder: UpstreamForwarder | None, headers: Headers) -> bytes:
    """Return the body of the response to GET /v1/models: all LLMs, and knowgate/GATE for each selectable gate.

    A thread writes it, because an upstream may list many LLMs.
    """
    names = [MODEL_PREFIX, *(f"{MODEL_PREFIX}/{gate}" for gate in list_selectable_gates(gate_service))]
    models: list[dict[str, Any]] = []
    if forwarder is not None:
        models = await forwarder.upstream.list_models(headers)
    else:
        names.insert(0, gate_service.rag.model.name)
    created = int(time.time())
    models += [{"id": name, "object": "model", "created": created, "owned_by": "knowgate"} for name in names]
    return await asyncio.to_thread(dump_json, {"object": "list", "data": models}, is_large=True)


async def _check_lengths(gate_service: GateService, questions: Sequence[str]) -> None:
    """Check that the questions of a list are not too long after Unicode normalization.

    Normalization takes milliseconds per question, so it runs in a thread, one question at a time.

    Raises:
        ApiError: 400 if a question is too long, 503 if many requests wait for this check.
    """
    try:
        for index, text in enumerate(questions):
            may_be_long = get_max_normalized_length(text) > MAX_QUESTION_CHARS
            if may_be_long and await gate_service.run_in_text_thread(partial(is_too_long, text)):
                raise ApiError(400, f"'questions.{index}' is invalid: {TOO_LONG}.", "invalid_question")
    except TimeoutError:
        raise ApiError(503, "too many long questions are being checked. Try again later.", "busy") from None


def _read_questions(model: Model, request: DecideRequest) -> list[Question]:
    """Return the questions of a request, from its field `question`, `questions` or `messages`.

    Raises:
        ApiError: 400 if the request has none or several of these fields, or if the chat does not end with a question.
    """
    if sum(field is not None for field in (request.question, request.questions, request.messages)) != 1:
        message = "the request must have exactly one of the fields 'question', 'questions' and 'messages'."
        raise ApiError(400, message, "invalid_question")
    if request.messages is not None:
        question = extract_question(model, request.messages)
        if isinstance(question, UngatedRequest):
            raise ApiError(400, f"the chat does not end with a plain question: {question.reason}.", "not_a_question")
        return [question]
    return [Question(text) for text in request.questions or [str(request.question)]]


async def _decide_question(
    gate_service: GateService,
    forwarder: UpstreamForwarder | None,
    rag: AdaptiveRAG,
    question: Question,
    headers: Headers,
    trace: RequestTrace,
    shared_budget: PatternTimeBudget | None = None,
) -> Decision:
    """Decide whether a question needs retrieval. Rules come first, then the gate, with a draft if needed.

    Args:
        gate_service: Decides with the rules and the gate.
        forwarder: Forwarder to the upstream, from which a draft is requested. None if the LLM runs in this process.
        rag: The pipeline with the rules and the gate.
        question: The question.
        headers: Headers of the request.
        trace: Record of the request. Its `way` says where the decision is made, and whether a draft was requested for it.
        shared_budget: Time budget for the regular expressions of the rules, if several questions share one.
    """
    if forwarder is None:
        trace.way = "in-process"
    elif trace.way != SEPARATE_DRAFT:
        trace.way = "question"
    trace.decision = await gate_service.apply_rules(rag, question, shared_budget)
    if trace.decision is not None:
        return trace.decision
    draft: Completion | None = None
    if forwarder is None and rag.bound_gate.needs and not gate_service.get_staleness(rag, ""):
        return await _decide_in_process(gate_service, rag.without_rules, question, trace)
    if forwarder is not None and not gate_service.get_signal_request(rag, trace).is_empty:
        trace.way = SEPARATE_DRAFT
        upstream_draft = await _request_draft(forwarder, rag, question, headers, trace)
        if upstream_draft is None:  # which is no failure of the gate
            return gate_service.bypass_failed_gate(rag, trace, "the upstream refused the draft")
        draft = upstream_draft.completion
    return await gate_service.decide(rag, question, draft, trace)


async def _decide_in_process(
    gate_service: GateService, rag: AdaptiveRAG, question: Question, trace: RequestTrace
) -> Decision:
    """Decide with a gate that reads the LLM in this process, in the thread of the LLM, where API keys take turns."""
    runner = GuardedStageRunner(gate_service, asyncio.get_running_loop())
    try:
        with trace.measure("gate"):
            trace.decision = await rag.replace(runner=runner).adecide(TracedQuestion.from_question(question, trace))
    except Exception as error:  # noqa: BLE001 - whatever the LLM raises, there is a decision
        return gate_service.bypass_failed_gate(rag, trace, get_reason(error, gate_service.timeout))
    return trace.decision


async def _request_draft(
    forwarder: UpstreamForwarder, rag: AdaptiveRAG, question: Question, headers: Headers, trace: RequestTrace
) -> UpstreamDraft | None:
    """Ask the upstream for a draft (answer without passages). None if it refuses. The trace gets the token counts."""
    model = trace.model_name or forwarder.options.upstream_model or await forwarder.upstream.get_default_model(headers)
    messages = [{"role": "user", "content": question.text}]
    for limit_field in ("max_tokens", "max_completion_tokens"):  # reasoning models of OpenAI know only the second one
        body = {"model": model, "messages": messages, limit_field: rag.bound_gate.request.draft_tokens}
        answer = await forwarder.request_answer(ForwardedRequest(body, b"", headers, trace), rag.bound_gate, "draft")
        if isinstance(answer, UpstreamDraft):
            trace.draft_usage = await measure_draft(answer, body, len(question.text))
            trace.extra_usage = trace.draft_usage
            return answer
        try:
            content = await read_content(answer, MAX_ERROR_BYTES)
        except (InvalidResponse, ClientError, OSError):  # too large or cut off
            break
        if answer.status != 400 or b"max_tokens" not in content:
            break
    return None


async def answer_prompt(forwarder: UpstreamForwarder, request: ForwardedRequest, path: str) -> Response:
    """Answer a request to /completions or /responses with the upstream. Add passages if the gate decides so."""
    gate_service, trace = forwarder.gate_service, request.trace
    rag = await gate_service.prepare(request.body, trace)
    question: Question | UngatedRequest | None = check_upstream_tools(request.body)
    if question is None:
        extract_question = partial(REQUEST_FORMATS[path].extract_question, rag.model, request.body)
        question = await read_chat(len(request.raw_body), extract_question)
    if isinstance(question, UngatedRequest):
        trace.ungated_reason = question.reason
        return await forwarder.pass_through(request, path)
    await forwarder.set_model(request)
    rag = require_own_model(rag, trace.max_loss, trace.other_model)
    trace.set_question(question)
    trace.decision = await _decide_question(gate_service, forwarder, rag, question, request.headers, trace)
    if trace.decision.retrieve and rag.retriever is not None:
        trace.passages = await BackgroundSearch(gate_service, rag, question).get_passages(trace)
        if trace.passages:
            size = sum(len(passage.text) for passage in trace.passages)
            await run_for_size(
                size, partial(forwarder.insert_passages, request, trace.passages, path), MAX_INLINE_MESSAGES
            )
        else:
            trace.note_nothing_found()
    return await forwarder.forward(request, path)


async def rerank_documents(
    gate_service: GateService, reranker: Reranker, request: RerankRequest, trace: RequestTrace
) -> RerankResponse:
    """Order the documents of a request by relevance to its query.

    Raises:
        ApiError: 503 if the reranker fails or takes too long.
    """
    texts = [document if isinstance(document, str) else document.text for document in request.documents]
    passages = [Passage(str(index), text[:MAX_DOCUMENT_CHARS]) for index, text in enumerate(texts)]
    try:
        async with limit_time(gate_service.timeout) as time_limit, gate_service.rerank_queue.hold(trace.owner):
            scored = await _score_in_batches(gate_service, reranker, request.query, passages, time_limit)
    except Exception as error:  # noqa: BLE001 - whatever the reranker raises, the client gets a sentence
        gate_service.limited_log.write("The reranker failed: %s", get_reason(error, gate_service.timeout))
        message = "the reranker failed or took too long. Send fewer or shorter documents, or try again later."
        raise ApiError(503, message, "reranker_down") from None
    scored.sort(key=lambda passage: (-(passage.score or 0.0), int(passage.id)))
    results: list[dict[str, Any]] = []
    for passage in scored[: request.top_n]:
        index = int(passage.id)
        document = {"document": {"text": texts[index]}} if request.return_documents else {}
        results.append({"index": index, "relevance_score": passage.score, **document})
    return RerankResponse.model_validate({"id": trace.id, "model": reranker.name, "results": results})


async def _score_in_batches(
    gate_service: GateService, reranker: Reranker, query: str, passages: Sequence[Passage], time_limit: asyncio.Timeout
) -> list[Passage]:
    """Return the passages with their relevance to a query.

    They are scored in batches, because searches of other requests can run between two batches.
    """
    scored: list[Passage] = []
    batch_chars = math.inf if isinstance(reranker, RemoteReranker) else LOCAL_BATCH_CHARS
    for batch in _split_documents(passages, batch_chars):
        work = partial(rerank, reranker, [query], [batch], len(batch))
        [scored_batch] = await gate_service.run_reranker(reranker, work, time_limit)
        scored += scored_batch
    return scored


def _split_documents(passages: Sequence[Passage], max_chars: float) -> Iterator[list[Passage]]:
    """Split documents into batches of up to BATCH_DOCUMENTS. Those of several documents have up to `max_chars` characters."""
    batch: list[Passage] = []
    for passage in passages:
        n_chars = sum(len(other.text) for other in batch) + len(passage.text)
        if batch and (len(batch) == BATCH_DOCUMENTS or n_chars > max_chars):
            yield batch
            batch = []
        batch.append(passage)
    if batch:
        yield batch
