"""Answers that audits compare.

One answer is the text of the response that the client got. The other one is generated afterwards: with passages if the
client's answer had none, or without passages if it had some.

If the two agree, the LLM probably knows the answer to the question; if they differ, it probably does not. That is a
label for the history of questions. Labels from feedback of users take precedence. A question that was only answered
without passages gets no label, because otherwise every skip would confirm itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from knowgate.core.text import cut_answer
from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LabelSource, LogEntry, question_key
from knowgate.errors import KnowgateError, ModelError
from knowgate.evaluation.server_log import SEPARATE_DRAFT
from knowgate.gates.arbiters.abstention import RULES_ARBITER, answers_differ
from knowgate.labels.grading import parse_verdict
from knowgate.models.fair_executor import CLIENT
from knowgate.models.prompts.templates import detect_language, load_packaged_templates
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.traffic_log import TrafficLog, close_connection
from knowgate.server.chat.gate_service import GateService
from knowgate.server.chat.local_pipeline import GuardedStageRunner, TracedQuestion
from knowgate.server.learning.answer_text import extract_answer
from knowgate.server.schemas import DeletionResponse
from knowgate.server.telemetry.trace import ClientRequest, RequestTrace
from knowgate.server.upstream.forwarded_request import ForwardedRequest
from knowgate.server.upstream.forwarding import CHAT_PATH, UpstreamForwarder
from knowgate.server.upstream.response_body import run_for_size
from knowgate.types import Passage, Question

log = logging.getLogger(__name__)

VERDICT_TOKENS = 1_000  # for "yes" or "no", because some LLMs think first
# Fields of the request for a verdict. Reasoning models of OpenAI reject the first ones.
VERDICT_LIMITS: tuple[dict[str, Any], ...] = (
    {"max_tokens": VERDICT_TOKENS, "temperature": 0},
    {"max_completion_tokens": VERDICT_TOKENS},
)
REMAINS_NOTE = (
    "Another process uses the file or table of the history, which therefore still has deleted texts. They are erased soon "
    "after it ends: from a file within seconds, from PostgreSQL within five minutes. Repeat this request to see whether "
    "that has happened."
)
UNAVAILABLE_NOTE = "The history is unavailable now, so the question may still be in it. Repeat this request later."
MAX_INLINE_CHARS = 2_000  # longer answers are compared in a thread
# Request fields that are removed before the request is sent again for an audit.
DROPPED_FIELDS = (
    "stream",
    "stream_options",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "knowgate",
    "store",
    "metadata",
)


def get_full_draft(trace: RequestTrace) -> str | None:
    """Return the draft (answer without passages) of a request, or None. Partial drafts are not returned.

    Neither is a draft of the question alone, which lacks the instructions of the client.
    """
    draft, request = trace.draft, trace.client_request
    # A streamed draft is read only as far as the gate needs it. An LLM in this process, and other endpoints than that for
    # chats, make short drafts anyway.
    is_short = trace.way == "in-process" or (request is not None and request.path != CHAT_PATH)
    may_be_partial = is_short or (request is not None and bool(request.body.get("stream")))
    if draft is None or trace.way == SEPARATE_DRAFT or (may_be_partial and not draft.finished):
        return None
    return draft.text


async def prepare_answers(
    closed: str | None, opened: str | None
) -> tuple[str | None, str | None, KnowledgeLabel | None]:
    """Cut two answers to what is compared of them, and label their question. Other requests need not wait for long ones.

    Returns:
        The beginnings of the answers without and with passages, and the label. It is None if one of them is missing.
    """

    def prepare() -> tuple[str | None, str | None, KnowledgeLabel | None]:
        first, second = cut_optional_answer(closed), cut_optional_answer(opened)
        return first, second, label_by_agreement(first, second) if first and second else None

    return await run_for_size(len(closed or "") + len(opened or ""), prepare, MAX_INLINE_CHARS)


def cut_optional_answer(answer: str | None) -> str | None:
    """Return the beginning of an answer, as far as answers are compared and stored. None stays None."""
    return None if answer is None else cut_answer(answer)


# --- the answer that was not given ----------------------------------------------------------------


class CounterfactualAnswerer:
    """Generator of the answer that the opposite decision would have given.

    Example: the client got an answer without passages, so this one uses passages.

    Args:
        gate_service: Searches for passages. Its model answers if there is no upstream.
        forwarder: Sends requests to the upstream, if there is one.
        timeout: Maximum seconds for one answer.
        most_tokens: Maximum length of an answer of the model in this process.
    """

    def __init__(
        self, gate_service: GateService, forwarder: UpstreamForwarder | None, timeout: float, most_tokens: int
    ):
        self.gate_service = gate_service
        self.forwarder = forwarder
        self.timeout = timeout
        self.most_tokens = most_tokens

    async def answer_with_passages(self, request: ClientRequest, question: str, closed_answer: str) -> str | None:
        """Answer a question with passages.

        Returns:
            The answer. If the search finds no passages, this is `closed_answer`, the answer without passages. None if
            the search or the LLM fails.
        """
        async with asyncio.timeout(self.timeout):
            if self.forwarder is None:
                return await self._answer_in_process(request, question, retrieve=True)
            trace = RequestTrace()
            passages = await self.gate_service.search(self.gate_service.rag, Question(question), trace)
            if trace.degraded:  # the search failed
                return None
            return await self._answer_upstream(self.forwarder, request, passages) if passages else closed_answer

    async def answer_closed_book(self, request: ClientRequest, question: str) -> str | None:
        """Answer a question without passages. Returns None if the LLM fails."""
        async with asyncio.timeout(self.timeout):
            if self.forwarder is None:
                return await self._answer_in_process(request, question, retrieve=False)
            return await self._answer_upstream(self.forwarder, request, passages=())  # `request` has the question

    async def compare(self, request: ClientRequest, question: str, closed_answer: str, open_answer: str) -> bool:
        """Ask the LLM of the upstream whether two answers mean the same. Needs an upstream.

        Raises:
            ModelError: The reply of the LLM contains neither yes nor no.
        """
        assert self.forwarder is not None
        templates = load_packaged_templates("compare")
        language = detect_language(question)
        prompt = templates.fill("same", language, question=question, first=closed_answer, second=open_answer)
        fields = {name: request.body[name] for name in ("model", "user") if name in request.body}
        body = {**fields, "messages": [{"role": "user", "content": prompt}]}
        reply: str | None = None
        async with asyncio.timeout(self.timeout):
            for limits in VERDICT_LIMITS:
                verdict_request = ClientRequest({**body, **limits}, request.headers)
                reply = reply or await self._answer_upstream(self.forwarder, verdict_request, ())
        if reply and "<think>" in reply:  # some LLMs think in their answer. Without the end, there is no verdict.
            _, _, reply = reply.partition("</think>")
        is_same = parse_verdict(reply or "")
        if is_same is None:
            raise ModelError("the LLM was asked whether two answers mean the same, but replied neither yes nor no.")
        return is_same

    async def _answer_in_process(self, request: ClientRequest, question: str, *, retrieve: bool) -> str | None:
        """Answer with the model in this process, with or without passages, at the length of the request. Nothing is logged.

        Returns:
            The answer, or None if the search failed.
        """
        gate = self.gate_service.always_gate if retrieve else self.gate_service.never_gate
        runner = GuardedStageRunner(self.gate_service, asyncio.get_running_loop())
        # An arbiter could return the answer without passages, so that the two answers would seem to agree.
        options: dict[str, Any] = {"threshold": None, "rules": None, "log": None, "arbiter": None, "shadow": ""}
        if requested_tokens := request.body.get("max_completion_tokens") or request.body.get("max_tokens"):
            options["max_tokens"] = min(requested_tokens, self.most_tokens)
        rag = self.gate_service.rag.replace(gate=gate, runner=runner, **options)
        traced = TracedQuestion(question, trace=RequestTrace(owner=CLIENT.get()))
        answer = await rag.aanswer(traced)
        return None if "retriever" in traced.trace.degraded else answer.text

    async def _answer_upstream(
        self, forwarder: UpstreamForwarder, request: ClientRequest, passages: Sequence[Passage]
    ) -> str | None:
        """Send a client's request to the upstream again, with these passages. Return the answer."""
        body = {name: value for name, value in request.body.items() if name not in DROPPED_FIELDS}
        if request.path == "/responses":
            body["store"] = False  # by default, the upstream stores every response
        deadline = asyncio.get_running_loop().time() + self.timeout
        forwarded = ForwardedRequest(body, b"", request.headers, RequestTrace(), deadline, changed_body=body)
        try:
            await forwarder.set_model(forwarded)
            if passages:
                forwarder.insert_passages(forwarded, passages, request.path)
            response = await forwarder.forward(forwarded, request.path)
            text, _ = await run_for_size(len(response.body), lambda: extract_answer(response))
            return text
        finally:
            forwarded.trace.end()


# --- labels -----------------------------------------------------------------------------------------


def label_by_agreement(closed_answer: str, open_answer: str) -> KnowledgeLabel:
    """Label a question as known if the answers without and with passages agree, otherwise as unknown."""
    return make_label(closed_answer, is_changed=answers_differ(closed_answer, open_answer))


def make_label(closed_answer: str, *, is_changed: bool) -> KnowledgeLabel:
    """Label a question as unknown if passages change the answer, or if the answer without them says "I don't know"."""
    is_unknown = is_changed or RULES_ARBITER.abstains(closed_answer)
    return KnowledgeLabel.UNKNOWN if is_unknown else KnowledgeLabel.KNOWN


def label_by_feedback(rating: str, correction: str | None, answers: Mapping[str, Any]) -> KnowledgeLabel | None:
    """Label a question as known or unknown to the LLM, by user feedback.

    The label says whether the answer without passages is right. A correction takes precedence over a rating.

    Args:
        rating: "up" or "down".
        correction: The right answer, if the user gave it.
        answers: `closed`, the answer without passages, and `opened`, the answer with passages, as far as they exist.
            `retrieved`: whether the answer that was sent used passages.

    Returns:
        The label, or None if the feedback does not show whether the LLM knows the answer.
    """
    closed_answer, open_answer = answers.get("closed"), answers.get("opened")
    if correction and closed_answer is not None:
        return label_by_agreement(closed_answer, correction)
    if not answers.get("retrieved"):  # the rating is about the answer without passages
        return KnowledgeLabel.KNOWN if rating == "up" else KnowledgeLabel.UNKNOWN
    if rating == "up" and closed_answer is not None and open_answer is not None:  # the answer with passages is right
        return label_by_agreement(closed_answer, open_answer)
    return None


@dataclass
class HistoryLabeler:
    """Writer of labels in the history: whether the LLM knows the answer to a question.

    Attributes:
        rag: The pipeline. The labels are valid only for its LLM and prompts.
        history: The history, or None if labels are not stored.
    """

    rag: AdaptiveRAG
    history: TrafficLog | None = None

    def add(self, question: str, label: KnowledgeLabel, source: LabelSource) -> Future[bool] | None:
        """Queue a label for storing, and return at once. Errors are logged.

        Returns:
            A future that becomes true when the label is stored, or None if there is no history or an error occurred.
        """
        if self.history is None:
            return None
        scope = HistoryScope(self.rag.model.fingerprint, self.rag.prompts.fingerprint, self.history.tenant)
        try:
            return self.history.log_entries([LogEntry(question, label, scope, source)])
        except KnowgateError as error:
            log.warning("A label could not be stored: %s", error)
            return None


def delete_from_history(
    history: TrafficLog | None, question: str | None, is_admin: bool, n_decisions: int
) -> DeletionResponse:
    """Delete a question from the history. Only admin keys may do this.

    Args:
        history: The history, if there is one.
        question: The question, or None if its text was not stored.
        is_admin: Whether the API key may delete from the history.
        n_decisions: The number of its decisions that were deleted.

    Returns:
        What was deleted, and whether the question is certainly not (or no longer) in the history.
    """
    if history is None or question is None:
        return DeletionResponse(forgotten=history is None, decisions=n_decisions, history=0)
    key = question_key(question)
    try:
        if not is_admin:  # nothing is deleted, but the caller learns whether an entry is left behind
            is_left = history.is_waiting(key) or bool(history.store.find_ids(key))
            return DeletionResponse(forgotten=not is_left, decisions=n_decisions, history=0)
        n_entries = history.drop_waiting(key)
        n_entries += history.store.forget(ids=history.store.find_ids(key))
        response = DeletionResponse(forgotten=True, decisions=n_decisions, history=n_entries)
        if history.store.has_remains:
            response.forgotten, response.note = False, REMAINS_NOTE
        return response
    except KnowgateError as error:
        log.warning("The history is unavailable: %s", error)
        return DeletionResponse(forgotten=False, decisions=n_decisions, history=0, note=UNAVAILABLE_NOTE)
    finally:
        close_connection(history.store)
