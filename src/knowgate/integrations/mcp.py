"""An MCP server (Model Context Protocol) with tools for agents: decide, search, ask and feedback (extra `mcp`).

| tool | returns |
|---|---|
| decide | whether the LLM needs retrieval for a question, how much, and why |
| search | passages, without a decision whether they are needed |
| ask | the answer with the decision and the passages it is based on |
| feedback | whether the feedback was added to the history that the gates dhicl and skr learn from |

The resource `knowgate://gate` is the model card of the gate.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, Field

from knowgate.core import VERSION
from knowgate.core.frameworks import check_framework_version
from knowgate.core.validation import check_integer
from knowgate.data.history.entries import LabelSource
from knowgate.errors import BadInput, BadSetting, KnowgateError
from knowgate.gates.artifacts.gate_folder import CARD_FILE
from knowgate.gates.fitted_gate import FittedGate
from knowgate.integrations.decider import Decider, run_in_model_thread
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import decision_record, get_complete_draft
from knowgate.server.learning.answers import HistoryLabeler, label_by_feedback
from knowgate.server.options import LOOPBACK_HOSTS
from knowgate.types import Answer, Passage

MAX_STORED_ANSWERS = 1000  # answers kept in memory, so that feedback can refer to them
MAX_PASSAGES = 100  # maximum passages of one search

Tool = Callable[..., Awaitable[Any]]
INSTRUCTIONS = (
    "Before searching, call decide: it says whether the LLM already knows. ask decides, searches and answers."
)


class DecisionResult(BaseModel):
    """Decision whether to retrieve. `need` is the score, from 0 (the LLM knows) to 1 (retrieve)."""

    retrieve: bool
    need: float
    threshold: float
    gate: str
    reason: str
    rule: str = ""
    notes: list[str] = Field(default_factory=list)


class SearchResult(BaseModel):
    """The passages of a search, best first."""

    passages: list[Passage]


class AnswerResult(BaseModel):
    """Answer with its decision and passages. `id` is for the tool `feedback`."""

    id: str
    answer: str
    decision: DecisionResult
    passages: list[Passage]
    finished: bool = True


class FeedbackResult(BaseModel):
    """Result of feedback to an answer. `learnt` tells whether gates can learn from it. If not, `note` says why."""

    id: str
    learnt: bool
    note: str = ""


@dataclass(frozen=True)
class McpTools:
    """The tools of the server. Agents read the docstrings of the methods `decide`, `search`, `ask` and `feedback`.

    Args:
        decider: Decides whether questions need retrieval. Its pipeline searches and answers.
        answers: The latest answers by id, oldest first.
    """

    decider: Decider
    answers: OrderedDict[str, Answer] = field(default_factory=OrderedDict)

    @property
    def rag(self) -> AdaptiveRAG:
        return self.decider.rag

    async def decide(self, question: str) -> DecisionResult:
        """Decide whether the LLM needs documents to answer this question, and say why. Does not answer it."""
        return DecisionResult(**decision_record(await self.decider.adecide(question)))

    async def search(self, query: str, k: int | None = None) -> SearchResult:
        """Search the documents and return passages, best first, whether or not they are needed."""
        if self.rag.retriever is None:
            raise BadSetting("there are no documents to search. Start the server with `docs` or `index`.")
        rag = self.rag if k is None else self.rag.replace(k=check_integer(k, "k", maximum=MAX_PASSAGES))
        passages = await asyncio.to_thread(run_in_model_thread, rag.model, lambda: rag.retrieve(query))
        return SearchResult(passages=list(passages))

    async def ask(self, question: str) -> AnswerResult:
        """Answer a question; search the documents only if the LLM does not know the answer by itself."""
        answer = await self.rag.aanswer(question)
        answer_id = f"kg-{uuid.uuid4().hex}"
        self.answers[answer_id] = answer
        if len(self.answers) > MAX_STORED_ANSWERS:
            self.answers.popitem(last=False)
        return AnswerResult(
            id=answer_id,
            answer=answer.text,
            decision=DecisionResult(**decision_record(answer.decision)),
            passages=list(answer.passages),
            finished=answer.finished,
        )

    async def feedback(self, id: str, rating: Literal["up", "down"], correction: str | None = None) -> FeedbackResult:
        """Report whether an answer of `ask` was right (up) or wrong (down), and optionally the right answer."""
        if id not in self.answers:
            raise BadInput(f"there is no answer with the id '{id[:60]}'. Use the id of a recent answer of `ask`.")
        if self.rag.log is None:
            note = "there is no history to add feedback to. Start the server with `log` to learn from feedback."
            return FeedbackResult(id=id, learnt=False, note=note)
        answer = self.answers[id]
        label = label_by_feedback(rating, correction, _get_known_answers(answer, self.rag.max_tokens))
        if label is None:
            note = "this feedback does not show whether the LLM knows the answer by itself."
            return FeedbackResult(id=id, learnt=False, note=note)
        HistoryLabeler(self.rag, self.rag.log).add(answer.question.text, label, LabelSource.HUMAN)
        return FeedbackResult(id=id, learnt=True)

    def make_card(self) -> str:
        """The model card of the gate: what it is, how well it decides, and what is guaranteed."""
        rag = self.rag
        gate = rag.bound_gate
        if isinstance(gate, FittedGate) and (gate.artifact.path / CARD_FILE).is_file():
            return (gate.artifact.path / CARD_FILE).read_text(encoding="utf-8", errors="replace")
        return (
            f"# Gate {gate.name}\n\n- LLM: {rag.model.name}\n- retrieves if need is above {rag.used_threshold:g}\n"
            f"- reads: {', '.join(sorted(gate.needs)) or 'nothing from the LLM'}\n"
            f"- {rag.guarantee or 'its threshold has no guarantee'}\n"
        )


def create_mcp_server(rag: AdaptiveRAG, *, fall_open: bool = False) -> Any:
    """Create an `MCPServer` for a pipeline.

    `run()` serves stdin and stdout, `streamable_http_app()` returns an HTTP application.

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

    server.tool(annotations=read_only)(_translate_errors(tools.decide))
    server.tool(annotations=read_only)(_translate_errors(tools.search))
    server.tool()(_translate_errors(tools.ask))
    server.tool()(_translate_errors(tools.feedback))
    server.resource("knowgate://gate", name="gate", mime_type="text/markdown")(tools.make_card)
    return server


def run_mcp_server(
    rag: AdaptiveRAG, *, http: bool = False, host: str = "127.0.0.1", port: int = 8000, fall_open: bool = False
) -> None:
    """Run an MCP server on stdin and stdout, or over HTTP at http://HOST:PORT/mcp.

    Args:
        rag: The pipeline.
        http: Whether to use HTTP instead of stdin and stdout.
        host: The address to listen on. Only loopback addresses are allowed.
        port: The port to listen on.
        fall_open: If the gate fails, decide to retrieve instead of raising an error.

    Raises:
        BadSetting: Other machines could reach `host`, and this server has no authentication.
    """
    if http and host not in LOOPBACK_HOSTS:
        raise BadSetting(f"this server has no authentication, so host={host!r} is not allowed. Use 127.0.0.1.")
    server = create_mcp_server(rag, fall_open=fall_open)
    if http:
        server.run("streamable-http", host=host, port=port)
    else:
        server.run("stdio")


def _translate_errors(tool: Tool) -> Tool:
    """Return a tool that raises knowgate's errors as `ToolError`. MCP clients get its message."""

    @functools.wraps(tool)
    async def call(*arguments: Any, **keywords: Any) -> Any:
        from mcp.server.mcpserver.exceptions import ToolError

        try:
            return await tool(*arguments, **keywords)
        except KnowgateError as error:
            raise ToolError(str(error)) from None

    return call


def _get_known_answers(answer: Answer, max_tokens: int) -> dict[str, Any]:
    """Return the generated answers without and with passages. `max_tokens` is the maximum length of an answer.

    Returns:
        `closed`, the text of the answer without passages, and `opened`, that of the answer with passages; None if it
        was not generated completely. `retrieved` says whether the answer that was given has passages.
    """
    if not answer.passages:
        return {"closed": answer.text, "opened": None, "retrieved": False}
    gave_draft = answer.choice is not None and answer.choice.is_closed_book
    return {"closed": get_complete_draft(answer, max_tokens), "opened": answer.open_text, "retrieved": not gave_draft}
