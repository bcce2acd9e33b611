"""An MCP server (Model Context Protocol) that lets agents decide, search, ask and give feedback (extra `mcp`).

| tool | returns |
|---|---|
| decide | whether the LLM needs retrieval for a question, how much, and why |
| search | passages, whether or not they are needed |
| ask | the answer with the decision and the passages it is based on |
| feedback | whether the feedback was added to the history that the gates dhicl and skr learn from |

The resource `knowgate://gate` is the card of the gate.
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
from knowgate.core.validation import check_integer
from knowgate.data.history.entries import HistoryScope, LabelSource, LogEntry
from knowgate.errors import BadInput, BadSetting, KnowgateError
from knowgate.gates.fitted_gate import FittedGate
from knowgate.integrations.decider import Decider, run_in_model_thread
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import decision_record
from knowgate.server.learning.history_labels import label_by_feedback
from knowgate.types import Answer, Decision, Passage

MAX_STORED_ANSWERS = 1000  # the latest answers, for feedback
MAX_PASSAGES = 100  # of one search
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
ResultT = TypeVar("ResultT")
INSTRUCTIONS = (
    "Before searching the documents, call decide: it says whether the LLM behind this server already knows the answer. "
    "ask decides, searches if needed, and answers."
)


class DecisionResult(BaseModel):
    """A decision: retrieve if `need` (0: the LLM knows the answer, 1: it needs documents) is above the threshold."""

    retrieve: bool
    need: float
    threshold: float
    gate: str
    reason: str
    rule: str = ""
    notes: list[str] = Field(default_factory=list)

    @classmethod
    def from_decision(cls, decision: Decision) -> DecisionResult:
        return cls.model_validate(decision_record(decision))


class SearchResult(BaseModel):
    """The passages of a search, best first."""

    passages: list[Passage]


class AnswerResult(BaseModel):
    """An answer, its id for feedback, and the passages the LLM was shown."""

    id: str
    answer: str
    decision: DecisionResult
    passages: list[Passage]
    finished: bool = True


class FeedbackResult(BaseModel):
    """Whether feedback was added to the history that gates learn from."""

    id: str
    learnt: bool
    note: str = ""


@dataclass(frozen=True)
class McpTools:
    """The tools of the server, without the protocol.

    Args:
        decider: Decides; its pipeline answers.
        answers: The latest answers by id.
    """

    decider: Decider
    answers: OrderedDict[str, Answer] = field(default_factory=OrderedDict)

    @property
    def rag(self) -> AdaptiveRAG:
        return self.decider.rag

    async def decide(self, question: str) -> DecisionResult:
        return DecisionResult.from_decision(await self.decider.adecide(question))

    async def search(self, query: str, k: int | None = None) -> SearchResult:
        if self.rag.retriever is None:
            raise BadSetting("there are no documents to search. Start the server with `docs` or `index`.")
        rag = self.rag if k is None else self.rag.replace(k=check_integer(k, "k", maximum=MAX_PASSAGES))
        passages = await asyncio.to_thread(run_in_model_thread, rag.model, lambda: rag.retrieve(query))
        return SearchResult(passages=list(passages))

    async def ask(self, question: str) -> AnswerResult:
        answer, answer_id = await self.rag.aanswer(question), f"kg-{uuid.uuid4().hex}"
        self.answers[answer_id] = answer
        while len(self.answers) > MAX_STORED_ANSWERS:
            self.answers.popitem(last=False)
        return AnswerResult(
            id=answer_id,
            answer=answer.text,
            decision=DecisionResult.from_decision(answer.decision),
            passages=list(answer.passages),
            finished=answer.finished,
        )

    async def add_feedback(self, answer_id: str, rating: str, correction: str | None = None) -> FeedbackResult:
        """Add a label to the history if the feedback says whether the LLM knew the answer by itself."""
        answer, log = self.answers.get(answer_id), self.rag.log
        if answer is None:
            raise BadInput(
                f"there is no answer with the id '{answer_id[:60]}'. Use one of the last {MAX_STORED_ANSWERS} of ask."
            )
        if log is None:
            note = "there is no history: start the server with `log` to learn from feedback."
            return FeedbackResult(id=answer_id, learnt=False, note=note)
        label = label_by_feedback(rating, correction, _get_known_answers(answer))
        if label is None:
            note = "this says nothing about what the LLM knows by itself."
            return FeedbackResult(id=answer_id, learnt=False, note=note)
        scope = HistoryScope(self.rag.model.fingerprint, self.rag.prompts.fingerprint, log.tenant)
        log.log_entries([LogEntry(answer.question.text, label, scope, LabelSource.HUMAN)])
        return FeedbackResult(id=answer_id, learnt=True)

    def make_card(self) -> str:
        """Return the card of a fitted gate, or a short description of any other gate."""
        gate, rag = self.rag.bound_gate, self.rag
        readme = gate.artifact.path / "README.md" if isinstance(gate, FittedGate) else None
        if readme is not None and readme.is_file():
            return readme.read_text(encoding="utf-8", errors="replace")
        threshold = gate.threshold if rag.threshold is None else rag.threshold
        lines = [
            f"# Gate {gate.name}\n",
            f"- LLM: {rag.model.name}",
            f"- retrieves if need is above {threshold:g}",
            f"- reads: {', '.join(sorted(gate.needs)) or 'nothing from the LLM'}",
            f"- {rag.guarantee or 'its threshold has no guarantee'}",
        ]
        return "\n".join(lines) + "\n"


def create_mcp_server(rag: AdaptiveRAG, *, fall_open: bool = False) -> Any:
    """Create an `MCPServer` for a pipeline: `.run()` serves stdio, `.streamable_http_app()` HTTP.

    Args:
        rag: The pipeline.
        fall_open: If the gate fails, decide to retrieve instead of raising an error.
    """
    check_framework_version("mcp", "mcp", majors=("2",))
    from mcp.server import MCPServer
    from mcp.types import ToolAnnotations

    tools = McpTools(Decider(rag, fall_open))
    server = MCPServer("knowgate", version=VERSION, instructions=INSTRUCTIONS, log_level="WARNING")
    read_only = ToolAnnotations(read_only_hint=True)

    @server.tool(annotations=read_only)
    async def decide(question: str) -> DecisionResult:
        """Decide whether the LLM needs documents to answer this question, and say why. Answers nothing."""
        return await _translate_errors(tools.decide(question))

    @server.tool(annotations=read_only)
    async def search(query: str, k: int | None = None) -> SearchResult:
        """Search the documents and return passages, best first, whether or not they are needed."""
        return await _translate_errors(tools.search(query, k))

    @server.tool()
    async def ask(question: str) -> AnswerResult:
        """Answer a question; search the documents only if the LLM does not know the answer by itself."""
        return await _translate_errors(tools.ask(question))

    @server.tool()
    async def feedback(id: str, rating: Literal["up", "down"], correction: str | None = None) -> FeedbackResult:
        """Say whether an answer of `ask` was right (up) or wrong (down), and optionally what is right."""
        return await _translate_errors(tools.add_feedback(id, rating, correction))

    @server.resource("knowgate://gate", name="gate", mime_type="text/markdown")
    def gate() -> str:
        """The card of the gate: what it is, how well it decides, and what is guaranteed."""
        return tools.make_card()

    return server


def run_mcp_server(
    rag: AdaptiveRAG, *, http: bool = False, host: str = "127.0.0.1", port: int = 8000, fall_open: bool = False
) -> None:
    """Serve MCP on stdin and stdout until the client disconnects, or on http://HOST:PORT/mcp until interrupted.

    Raises:
        BadSetting: Other machines could reach `host`; this server has no authentication.
    """
    if http and host not in LOOPBACK_HOSTS:
        raise BadSetting(
            f"host={host!r} can be reached by other machines, and this server has no authentication. Use 127.0.0.1 "
            "behind a proxy that authenticates clients."
        )
    server = create_mcp_server(rag, fall_open=fall_open)
    if http:
        server.run("streamable-http", host=host, port=port)
    else:
        server.run("stdio")


async def _translate_errors(work: Awaitable[ResultT]) -> ResultT:
    """Await a result; turn errors of knowgate into tool errors, whose message the client receives."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        return await work
    except KnowgateError as error:
        raise ToolError(str(error)) from None


def _get_known_answers(answer: Answer) -> dict[str, Any]:
    """Return the closed-book and the open-book answer, as far as they are known, for `label_by_feedback`."""
    if not answer.passages:
        return {"closed": answer.text, "opened": None, "retrieved": False}
    return {"closed": answer.draft.text if answer.draft else None, "opened": answer.open_text, "retrieved": True}
