"""A server of the Model Context Protocol: agents ask whether to look up, look up, have questions answered, and say what
they thought of it (extra `mcp`).

| tool | gives |
|---|---|
| decide | whether the LLM must look up, how much so, and why |
| search | passages, whether or not they are needed |
| ask | the answer, with what was decided and the passages it rests on |
| feedback | whether what was said about an answer is now in the log that dhicl and skr learn from |

The resource `knowgate://gate` is the gate's card.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field

from knowgate.core import VERSION
from knowgate.core.frameworks import check_framework_version
from knowgate.data.history.entries import HistoryScope, LabelSource, LogEntry
from knowgate.errors import BadInput, BadSetting, KnowgateError
from knowgate.gates.fitted_gate import FittedGate
from knowgate.integrations.decider import Decider, run_in_model_thread
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.server.learning.history_labels import label_by_feedback
from knowgate.types import Answer, Decision, Passage

MAX_STORED_ANSWERS = 1000  # answers that feedback can be given on
MAX_PASSAGES = 100  # passages of one search
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
ResultT = TypeVar("ResultT")
INSTRUCTIONS = (
    "Before searching the documents, call decide: it says whether the LLM behind this server knows the answer already. "
    "ask decides, searches where needed, and answers."
)


class PassageResult(BaseModel):
    """A passage."""

    id: str
    text: str
    title: str = ""
    score: float | None = None


class DecisionResult(BaseModel):
    """need: 0 = the LLM knows the answer, 1 = it must look it up; retrieve where it is above the threshold."""

    retrieve: bool
    need: float
    threshold: float
    gate: str
    reason: str
    rule: str = ""
    notes: list[str] = Field(default_factory=list)


class SearchResult(BaseModel):
    """What a search found, best first."""

    passages: list[PassageResult]


class AnswerResult(BaseModel):
    """An answer. id: for feedback. passages: what the LLM was shown."""

    id: str
    answer: str
    decision: DecisionResult
    passages: list[PassageResult]
    finished: bool = True


class FeedbackResult(BaseModel):
    """learnt: it is now a label in the log that gates learn from."""

    id: str
    learnt: bool
    note: str = ""


@dataclass(frozen=True)
class McpTools:
    """What the tools do, apart from the protocol. Errors are sentences."""

    decider: Decider
    answers: OrderedDict[str, Answer] = field(default_factory=OrderedDict)

    @property
    def rag(self) -> AdaptiveRAG:
        return self.decider.rag

    async def decide(self, question: str) -> DecisionResult:
        return _decided(await self.decider.adecide(question))

    async def search(self, query: str, k: int | None = None) -> SearchResult:
        if k is not None and not 1 <= k <= MAX_PASSAGES:
            raise BadInput(f"k is {k}; it must be between 1 and {MAX_PASSAGES}.")
        if self.rag.retriever is None:
            raise BadSetting("there are no documents to search: start with --docs FOLDER or --index DIR.")
        rag = self.rag if k is None else self.rag.replace(k=k)
        found = await asyncio.to_thread(run_in_model_thread, rag.model, lambda: rag.retrieve(query))
        return SearchResult(passages=[_found(one) for one in found])

    async def ask(self, question: str) -> AnswerResult:
        answer, id = await self.rag.aanswer(question), f"kg-{uuid.uuid4().hex}"
        self.answers[id] = answer
        while len(self.answers) > MAX_STORED_ANSWERS:
            self.answers.popitem(last=False)
        return AnswerResult(
            id=id,
            answer=answer.text,
            decision=_decided(answer.decision),
            passages=[_found(one) for one in answer.passages],
            finished=answer.finished,
        )

    async def feedback(self, id: str, rating: str, correction: str | None = None) -> FeedbackResult:
        answer = self.answers.get(id)
        if answer is None:
            raise BadInput(
                f"there is no answer '{id[:60]}': give the id of one of the last {MAX_STORED_ANSWERS} answers of ask."
            )
        if self.rag.log is None:
            return FeedbackResult(
                id=id, learnt=False, note="nothing is kept: start with --log FILE to learn from feedback."
            )
        label = label_by_feedback(rating, correction, _both(answer))
        if label is None:
            return FeedbackResult(id=id, learnt=False, note="this says nothing about what the LLM knows by itself.")
        scope = HistoryScope(self.rag.model.fingerprint, self.rag.prompts.fingerprint, self.rag.log.tenant)
        self.rag.log.log_entries([LogEntry(answer.question.text, label, scope, LabelSource.HUMAN)])
        return FeedbackResult(id=id, learnt=True)

    def card(self) -> str:
        """The card of a fitted gate; of others what there is to say."""
        gate, rag = self.rag.bound_gate, self.rag
        readme = gate.artifact.path / "README.md" if isinstance(gate, FittedGate) else None
        if readme is not None and readme.is_file():
            return readme.read_text(encoding="utf-8", errors="replace")
        threshold = gate.threshold if rag.threshold is None else rag.threshold
        lines = [f"# Gate {gate.name}", "", f"- LLM: {rag.model.name}", f"- retrieves when need is above {threshold:g}"]
        lines += [f"- reads: {', '.join(sorted(gate.needs)) or 'nothing of the LLM'}"]
        lines += [f"- {rag.guarantee}"] if rag.guarantee else ["- nothing is proven about its threshold"]
        return "\n".join(lines) + "\n"


def create_mcp_server(rag: AdaptiveRAG, *, fall_open: bool = False) -> Any:
    """An `MCPServer` around a pipeline: `.run()` for stdio, `.streamable_http_app()` for HTTP."""
    check_framework_version("mcp", "mcp", majors=("2",))
    from mcp.server import MCPServer
    from mcp.types import ToolAnnotations

    tools = McpTools(Decider(rag, fall_open))
    server = MCPServer("knowgate", version=VERSION, instructions=INSTRUCTIONS, log_level="WARNING")
    reads = ToolAnnotations(read_only_hint=True)

    @server.tool(annotations=reads)
    async def decide(question: str) -> DecisionResult:
        """Whether the LLM must look up documents to answer this question, and why. Answers nothing."""
        return await _said(tools.decide(question))

    @server.tool(annotations=reads)
    async def search(query: str, k: int | None = None) -> SearchResult:
        """Passages of the documents for a query, best first; whether they are needed is not asked."""
        return await _said(tools.search(query, k))

    @server.tool()
    async def ask(question: str) -> AnswerResult:
        """Answer a question, looking up documents only where the LLM does not know the answer by itself."""
        return await _said(tools.ask(question))

    @server.tool()
    async def feedback(id: str, rating: Literal["up", "down"], correction: str | None = None) -> FeedbackResult:
        """Say whether an answer of `ask` was right (up) or wrong (down), and what would have been right."""
        return await _said(tools.feedback(id, rating, correction))

    @server.resource("knowgate://gate", name="gate", mime_type="text/markdown")
    def gate() -> str:
        """The gate's card: what it is, how well it decides, what is proven about it."""
        return tools.card()

    return server


def run_mcp_server(
    rag: AdaptiveRAG, *, http: bool = False, host: str = "127.0.0.1", port: int = 8000, fall_open: bool = False
) -> None:
    """Until the client goes (stdio), or until it is told to stop (streamable HTTP on http://HOST:PORT/mcp)."""
    if http and host not in LOOPBACK_HOSTS:
        raise BadSetting(
            f"--host {host} can be reached from outside, and this server knows no keys: use 127.0.0.1, and put a proxy "
            "that checks who asks in front of it."
        )
    server = create_mcp_server(rag, fall_open=fall_open)
    if http:
        server.run("streamable-http", host=host, port=port)
    else:
        server.run("stdio")


async def _said(work: Awaitable[ResultT]) -> ResultT:
    """The result, or our error as one the client is told."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        return await work
    except KnowgateError as error:
        raise ToolError(str(error)) from None


def _decided(decision: Decision) -> DecisionResult:
    return DecisionResult(
        retrieve=decision.retrieve,
        need=round(decision.need, 6),
        threshold=decision.threshold,
        gate=decision.gate,
        reason=decision.reason,
        rule=decision.rule,
        notes=list(decision.notes),
    )


def _found(passage: Passage) -> PassageResult:
    return PassageResult(id=passage.id, text=passage.text, title=passage.title, score=passage.score)


def _both(answer: Answer) -> dict[str, Any]:
    """The answers from memory and with passages, as far as they are known."""
    if not answer.passages:
        return {"closed": answer.text, "opened": None, "retrieved": False}
    return {"closed": answer.draft.text if answer.draft else None, "opened": answer.open_text, "retrieved": True}
