"""LlamaIndex: a retriever and a query engine around theirs that look up only what they must; their LLMs and retrievers
as knowgate's (extra `llamaindex`).

An empty retriever makes LlamaIndex say "Empty Response"; the query engine answers from memory instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import Any

from knowgate.core.files import sha256_text
from knowgate.core.frameworks import check_framework_version, check_result_list, run_coroutine, wrap_errors
from knowgate.integrations.chat_model import ChatModel, ChatRequest
from knowgate.integrations.decider import as_decider
from knowgate.pipeline.answer_json import decision_record
from knowgate.types import Completion, Decision, Passage

check_framework_version("llama-index-core", "llamaindex", majors=("0.14", "0.13"))

from llama_index.core.base.llms.types import ChatMessage, MessageRole  # noqa: E402
from llama_index.core.base.response.schema import Response  # noqa: E402
from llama_index.core.query_engine import CustomQueryEngine  # noqa: E402
from llama_index.core.retrievers import BaseRetriever  # noqa: E402
from llama_index.core.schema import NodeWithScore, QueryBundle  # noqa: E402

METADATA_KEY = "knowgate"  # of metadata


class KnowgateRetriever(BaseRetriever):
    """Asks `wrapped` only where the gate says so. Nodes carry the decision in `metadata["knowgate"]`.

    Example:
        >>> retriever = KnowgateRetriever(index.as_retriever(), open_decider())  # doctest: +SKIP
    """

    def __init__(self, wrapped: Any, decider: Any, *, k: int | None = None):
        super().__init__()
        self._wrapped, self._decider, self._k = wrapped, as_decider(decider), k

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        decision = self._decider.decide(query_bundle.query_str)
        if not decision.retrieve:
            return []
        with wrap_errors(self._what):
            try:
                found = self._wrapped.retrieve(query_bundle)
            except NotImplementedError:  # async only
                found = run_coroutine(self._wrapped.aretrieve(query_bundle))
        return self._marked(found, decision)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        decision = await self._decider.adecide(query_bundle.query_str)
        if not decision.retrieve:
            return []
        with wrap_errors(self._what):
            found = await self._wrapped.aretrieve(query_bundle)
        return self._marked(found, decision)

    @property
    def _what(self) -> str:
        return f"the wrapped retriever {type(self._wrapped).__name__}"

    def _marked(self, found: Any, decision: Decision) -> list[NodeWithScore]:
        nodes: list[NodeWithScore] = check_result_list(found, self._what, self._k)
        for one in nodes:
            one.node.metadata[METADATA_KEY] = decision_record(decision)
            one.node.excluded_llm_metadata_keys = [*one.node.excluded_llm_metadata_keys, METADATA_KEY]
        return nodes


class KnowgateQueryEngine(CustomQueryEngine):
    """Asks `wrapped` where the gate says so; else the LLM answers from memory. llm: one of LlamaIndex's that does so
    instead of the decider's own. The response has the decision in `metadata["knowgate"]`.

    Example:
        >>> engine = KnowgateQueryEngine(wrapped=index.as_query_engine(), decider=open_decider())  # doctest: +SKIP
    """

    wrapped: Any
    decider: Any
    llm: Any = None

    def custom_query(self, query_str: str) -> Any:
        decider = as_decider(self.decider)
        decision = decider.decide(query_str)
        with wrap_errors(f"the wrapped query engine {type(self.wrapped).__name__}"):
            if decision.retrieve:
                return _told(self.wrapped.query(query_str), decision)
            said = decider.answer_from_memory(query_str) if self.llm is None else str(self.llm.complete(query_str))
        return _told(Response(said), decision)

    async def acustom_query(self, query_str: str) -> Any:
        decider = as_decider(self.decider)
        decision = await decider.adecide(query_str)
        with wrap_errors(f"the wrapped query engine {type(self.wrapped).__name__}"):
            if decision.retrieve:
                return _told(await self.wrapped.aquery(query_str), decision)
            if self.llm is not None:
                return _told(Response(str(await self.llm.acomplete(query_str))), decision)
            return _told(Response(await asyncio.to_thread(decider.answer_from_memory, query_str)), decision)


def _told(response: Any, decision: Decision) -> Any:
    response.metadata = {**(response.metadata or {}), METADATA_KEY: decision_record(decision)}
    return response


class LlamaIndexModel(ChatModel):
    """Any LLM of LlamaIndex's as knowgate's."""

    def __init__(self, llm: Any, *, name: str = ""):
        super().__init__(name or f"llamaindex:{llm.metadata.model_name}")
        self._llm = llm

    def _ask(self, asked: ChatRequest) -> Completion:
        reply = self._llm.chat([ChatMessage(asked.text, role=MessageRole.USER)], **_options(asked))
        return _completion(str(reply.message.content or ""))

    def _ask_in_parts(self, asked: ChatRequest) -> Generator[str, None, Completion]:
        pieces = []
        for part in self._llm.stream_chat([ChatMessage(asked.text, role=MessageRole.USER)], **_options(asked)):
            if part.delta:
                pieces.append(part.delta)
                yield part.delta
        return _completion("".join(pieces))


def _options(asked: ChatRequest) -> dict[str, Any]:
    return {"max_tokens": asked.max_tokens, "temperature": asked.temperature}


def _completion(text: str) -> Completion:
    return Completion(text, n_tokens=len(text.split()))


class LlamaIndexRetriever:
    """Any retriever of LlamaIndex's as knowgate's. version: of its documents, where you know one."""

    name = "llamaindex"

    def __init__(self, retriever: Any, *, version: str = ""):
        self._retriever = retriever
        self.fingerprint = sha256_text("llamaindex", type(retriever).__qualname__, version)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> list[Passage]:
        what = f"LlamaIndex's retriever {type(self._retriever).__name__}"
        with wrap_errors(what):
            try:
                found = self._retriever.retrieve(query)
            except NotImplementedError:  # async only
                found = run_coroutine(self._retriever.aretrieve(query))
        return [_passage(one) for one in check_result_list(found, what, k)]


def _passage(found: Any) -> Passage:
    about = found.node.metadata or {}
    title = about.get("title") or about.get("file_name") or ""
    return Passage(found.node.node_id, found.node.get_content(), str(title), found.score)
