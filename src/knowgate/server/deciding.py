"""`POST /v1/decide`: decisions alone, for one question, several, or the last one of a chat. Nothing is retrieved."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers

from knowgate.pipeline import AdaptiveRAG, decision_record
from knowgate.server.asking import Ungated, messages_of, question_of
from knowgate.server.drafting import draft_request, read_plain_draft
from knowgate.server.forwarding import CHAT, Forwarding
from knowgate.server.gatekeeper import Gatekeeper
from knowgate.server.policy import policy_of
from knowgate.server.problems import Problem
from knowgate.server.trace import Trace
from knowgate.types import Completion, Decision, Question

MOST = 256  # questions of one request


async def decide_questions(
    keeper: Gatekeeper, forwarding: Forwarding | None, body: Mapping[str, Any], headers: Headers, trace: Trace
) -> dict[str, Any]:
    """One record for `question` or `messages`, a list of them for `questions`."""
    rag = keeper.choose(keeper.assign(policy_of(body), body, trace))
    questions = await asyncio.to_thread(_questions, rag, body)
    deciding = Deciding(keeper, forwarding, rag, headers)
    decided = [await deciding.decide(question, trace) for question in questions]
    records = [decision_record(decision) for decision in decided]
    known = {"id": trace.id, "degraded": sorted(set(trace.degraded)), "milliseconds": trace.milliseconds}
    return {**known, "decisions": records} if "questions" in body else {**known, **records[0]}


class Deciding:
    """Asks the upstream for drafts where the gate reads them."""

    def __init__(self, keeper: Gatekeeper, forwarding: Forwarding | None, rag: AdaptiveRAG, headers: Headers):
        self.keeper = keeper
        self.forwarding = forwarding
        self.rag = rag
        self.headers = headers

    async def decide(self, question: Question, trace: Trace) -> Decision:
        ruled = self.keeper.foresee(self.rag, question)
        if ruled is not None:
            return ruled
        draft = None
        if self.forwarding is not None and not self.keeper.want_of(self.rag).is_nothing:
            draft = await self._draft(self.forwarding, question, trace)
        return await self.keeper.decide(self.rag, question, draft, trace)

    async def _draft(self, forwarding: Forwarding, question: Question, trace: Trace) -> Completion | None:
        """As much of an answer as the gate reads; None where the upstream refuses."""
        model = forwarding.options.upstream_model or await forwarding.upstream.default_model(self.headers)
        messages = [{"role": "user", "content": question.text}]
        wanted = {"model": model, "messages": messages, "max_tokens": self.rag.bound.want.draft_tokens}
        content = json.dumps(draft_request(wanted, self.rag.bound)).encode()
        with trace.timed("draft"):
            reply = await forwarding.upstream.send("POST", CHAT, content, self.headers)
            return (await read_plain_draft(reply)).completion if reply.status == 200 else None


def _questions(rag: AdaptiveRAG, body: Mapping[str, Any]) -> list[Question]:
    given = [name for name in ("question", "questions", "messages") if name in body]
    if len(given) != 1:
        raise Problem(400, "give one of 'question', 'questions' and 'messages'.", "invalid_question")
    if given == ["messages"]:
        asked = question_of(rag.model, messages_of(body))
        if isinstance(asked, Ungated):
            raise Problem(400, f"there is nothing to decide: {asked.why}.", "not_a_question")
        return [asked]
    listed = body["questions"] if given == ["questions"] else [body["question"]]
    if not isinstance(listed, list) or not 1 <= len(listed) <= MOST:
        raise Problem(400, f"'questions' must be a list of 1 to {MOST} texts.", "invalid_question")
    if not all(isinstance(text, str) and text.strip() for text in listed):
        raise Problem(400, "a question must be a text that says something.", "invalid_question")
    return [Question(text) for text in listed]
