"""Adapters for LlamaIndex (extra `llamaindex`).

They include a retriever and a query engine that retrieve only if needed. LlamaIndex's LLMs and retrievers can also be
used inside knowgate. If a retriever finds nothing, a query engine of LlamaIndex answers "Empty Response". If no
retrieval is needed, `KnowgateQueryEngine` lets the LLM answer from memory instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import Any

from knowgate.core.files import sha256_text
from knowgate.core.frameworks import call_or_await, check_framework_version, check_result_list, wrap_errors
from knowgate.integrations.chat_model import ChatModel, ChatRequest, make_completion
from knowgate.integrations.decider import METADATA_KEY, as_decider
from knowgate.pipeline.answer_json import decision_record
from knowgate.types import Completion, Decision, Passage

check_framework_version("llama-index-core", "llamaindex", majors=("0.14", "0.13"))

from llama_index.core.base.llms.types import ChatMessage, MessageRole  # noqa: E402
from llama_index.core.base.response.schema import Response  # noqa: E402
from llama_index.core.query_engine import CustomQueryEngine  # noqa: E402
from llama_index.core.retrievers import BaseRetriever  # noqa: E402
from llama_index.core.schema import NodeWithScore, QueryBundle  # noqa: E402


class KnowgateRetriever(BaseRetriever):
    """LlamaIndex retriever that skips unneeded searches.

    The gate decides per query. Each node has the decision in `metadata["knowgate"]`.

    Args:
        wrapped: Any LlamaIndex retriever.
        decider: A `Decider` or an `AdaptiveRAG`.
        k: The maximum number of nodes to return. Default: all.

    Example:
        >>> retriever = KnowgateRetriever(index.as_retriever(), open_decider())  # doctest: +SKIP
    """

    def __init__(self, wrapped: Any, decider: Any, *, k: int | None = None):
        super().__init__()
        self._wrapped = wrapped
        self._decider = as_decider(decider)
        self._k = k

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Search with the wrapped retriever, if the query needs retrieval."""
        wrapped = self._wrapped
        decision = self._decider.decide(query_bundle.query_str)
        if not decision.retrieve:
            return []
        with wrap_errors(self._description):
            nodes = call_or_await(lambda: wrapped.retrieve(query_bundle), lambda: wrapped.aretrieve(query_bundle))
        return self._add_decision(nodes, decision)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Do the same as `_retrieve`, without blocking the event loop."""
        decision = await self._decider.adecide(query_bundle.query_str)
        if not decision.retrieve:
            return []
        with wrap_errors(self._description):
            nodes = await self._wrapped.aretrieve(query_bundle)
        return self._add_decision(nodes, decision)

    @property
    def _description(self) -> str:
        """The wrapped retriever, as error messages name it."""
        return f"the wrapped retriever {type(self._wrapped).__name__}"

    def _add_decision(self, results: Any, decision: Decision) -> list[NodeWithScore]:
        """Add the decision to the metadata of the first `k` nodes. The LLM does not see it."""
        nodes: list[NodeWithScore] = check_result_list(results, self._description, self._k)
        for result in nodes:
            result.node.metadata[METADATA_KEY] = decision_record(decision)
            result.node.excluded_llm_metadata_keys = [*result.node.excluded_llm_metadata_keys, METADATA_KEY]
        return nodes


class KnowgateQueryEngine(CustomQueryEngine):
    """LlamaIndex query engine that skips unneeded searches.

    The LLM then answers from memory. The response has the decision in `metadata["knowgate"]`.

    Args:
        wrapped: Any LlamaIndex query engine.
        decider: A `Decider` or an `AdaptiveRAG`.
        llm: A LlamaIndex LLM that answers from memory. Default: the LLM of the decider.

    Example:
        >>> engine = KnowgateQueryEngine(wrapped=index.as_query_engine(), decider=open_decider())  # doctest: +SKIP
    """

    wrapped: Any
    decider: Any
    llm: Any = None

    def custom_query(self, query_str: str) -> Any:
        """Answer a query with the wrapped query engine, or from memory if no retrieval is needed."""
        decider = as_decider(self.decider)
        decision = decider.decide(query_str)
        with wrap_errors(self._description):
            if decision.retrieve:
                response = self.wrapped.query(query_str)
            elif self.llm is not None:
                response = Response(str(self.llm.complete(query_str)))
            else:
                response = Response(decider.answer_from_memory(query_str))
        return _add_decision(response, decision)

    async def acustom_query(self, query_str: str) -> Any:
        """Do the same as `custom_query`, without blocking the event loop."""
        decider = as_decider(self.decider)
        decision = await decider.adecide(query_str)
        with wrap_errors(self._description):
            if decision.retrieve:
                response = await self.wrapped.aquery(query_str)
            elif self.llm is not None:
                response = Response(str(await self.llm.acomplete(query_str)))
            else:
                response = Response(await asyncio.to_thread(decider.answer_from_memory, query_str))
        return _add_decision(response, decision)

    @property
    def _description(self) -> str:
        """The wrapped query engine, as error messages name it."""
        return f"the wrapped query engine {type(self.wrapped).__name__}"


def _add_decision(response: Any, decision: Decision) -> Any:
    """Add the decision to the metadata of a response, and return the response."""
    response.metadata = {**(response.metadata or {}), METADATA_KEY: decision_record(decision)}
    return response


class LlamaIndexModel(ChatModel):
    """A LlamaIndex LLM as a knowgate model.

    Args:
        llm: The LlamaIndex LLM.
        name: The name that identifies the model. Default: the model name in the metadata of the LLM.
    """

    def __init__(self, llm: Any, *, name: str = ""):
        super().__init__(name or f"llamaindex:{llm.metadata.model_name}")
        self._llm = llm

    def _complete(self, request: ChatRequest) -> Completion:
        """Send one request and return the answer."""
        response = self._llm.chat(**_make_arguments(request))
        return make_completion(str(response.message.content or ""), None, None, finished=True)

    def _stream(self, request: ChatRequest) -> Generator[str, None, Completion]:
        """Yield the answer to one request piece by piece, and return it whole."""
        pieces = []
        for chunk in self._llm.stream_chat(**_make_arguments(request)):
            if chunk.delta:
                pieces.append(chunk.delta)
                yield chunk.delta
        return make_completion("".join(pieces), None, None, finished=True)


def _make_arguments(request: ChatRequest) -> dict[str, Any]:
    """Return the arguments of `chat` and `stream_chat` of a LlamaIndex LLM."""
    messages = [ChatMessage(request.text, role=MessageRole.USER)]
    return {"messages": messages, "max_tokens": request.max_tokens, "temperature": request.temperature}


class LlamaIndexRetriever:
    """A LlamaIndex retriever as a knowgate retriever.

    Args:
        retriever: The LlamaIndex retriever.
        version: Any text that identifies the documents. Change it when they change, because a guarantee holds only for
            the documents it was calibrated with.
    """

    name = "llamaindex"

    def __init__(self, retriever: Any, *, version: str = ""):
        self._retriever = retriever
        self.fingerprint = sha256_text("llamaindex", type(retriever).__qualname__, version)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return the first k passages for each query."""
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> list[Passage]:
        """Return the first k passages for one query. Retrievers with only async methods work, too."""
        retriever = self._retriever
        description = f"LlamaIndex's retriever {type(retriever).__name__}"
        with wrap_errors(description):
            results = call_or_await(lambda: retriever.retrieve(query), lambda: retriever.aretrieve(query))
        return [_make_passage(result) for result in check_result_list(results, description, k)]


def _make_passage(result: Any) -> Passage:
    """Convert a node of LlamaIndex to a passage, titled by its metadata."""
    metadata = result.node.metadata or {}
    title = metadata.get("title") or metadata.get("file_name") or ""
    return Passage(result.node.node_id, result.node.get_content(), str(title), result.score)
