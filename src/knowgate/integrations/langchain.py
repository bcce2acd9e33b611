"""Adapters for LangChain and LangGraph (extra `langchain`).

They include a retriever that searches only if needed, middleware that hides the search tool of an agent, a route for
LangGraph, and a whole pipeline as a Runnable. LangChain's chat models and retrievers can also be used inside knowgate.
Callbacks receive each decision as the custom event `knowgate_decision`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from knowgate.core.files import sha256_text
from knowgate.core.frameworks import call_or_await, check_framework_version, check_result_list, wrap_errors
from knowgate.errors import BadSetting
from knowgate.integrations.chat_model import ChatModel, ChatRequest, make_completion, parse_logprobs
from knowgate.integrations.decider import METADATA_KEY, Decider, as_decider, run_in_model_thread
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import decision_record
from knowgate.pipeline.conversation import question_from_messages
from knowgate.types import Answer, AnswerEvent, Completion, Decision, DecisionEvent, Passage, Question, TextEvent

check_framework_version("langchain-core", "langchain", majors=("1",))

from langchain_core.callbacks import BaseCallbackHandler, adispatch_custom_event, dispatch_custom_event  # noqa: E402
from langchain_core.documents import Document  # noqa: E402
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage  # noqa: E402
from langchain_core.retrievers import BaseRetriever  # noqa: E402
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda  # noqa: E402

DECISION_EVENT = "knowgate_decision"
CHAT_ROLES = {"human": "user", "ai": "assistant", "user": "user", "assistant": "assistant"}
TRUNCATION_REASONS = ("length", "max_tokens", "MAX_TOKENS")  # how providers say that an answer was cut off


class DecisionRecorder(BaseCallbackHandler):
    """A callback that collects the decisions of a run in `records`.

    Example:
        >>> retriever.invoke(question, config={"callbacks": [DecisionRecorder()]})  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        if name == DECISION_EVENT:
            self.records.append(data)


class KnowgateRetriever(BaseRetriever):
    """LangChain retriever that skips unneeded searches.

    The gate decides per query. Each document has the decision in `metadata["knowgate"]`.

    Args:
        wrapped: Any LangChain retriever.
        decider: A `Decider` or an `AdaptiveRAG`.
        k: The maximum number of documents to return. Default: all.

    Example:
        >>> retriever = KnowgateRetriever(wrapped=mine, decider=open_decider())  # doctest: +SKIP
    """

    wrapped: Any
    decider: Any
    k: int | None = None

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        """Decide on a query, and search with the wrapped retriever if it needs retrieval."""
        decision = as_decider(self.decider).decide(query)
        config = _publish(run_manager, decision)
        if not decision.retrieve:
            return []
        with wrap_errors(self._description):
            # `config` holds synchronous callbacks, so a retriever that is only asynchronous does not get it.
            documents = call_or_await(lambda: self.wrapped.invoke(query, config), lambda: self.wrapped.ainvoke(query))
        return self._add_decision(documents, decision)

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        """Do the same as `_get_relevant_documents`, without blocking the event loop."""
        decision = await as_decider(self.decider).adecide(query)
        config = await _apublish(run_manager, decision)
        if not decision.retrieve:
            return []
        with wrap_errors(self._description):
            documents = await self.wrapped.ainvoke(query, config)
        return self._add_decision(documents, decision)

    @property
    def _description(self) -> str:
        """The wrapped retriever, as error messages name it."""
        return f"the wrapped retriever {type(self.wrapped).__name__}"

    def _add_decision(self, documents: Any, decision: Decision) -> list[Document]:
        """Return copies of the first `k` documents with the decision in their metadata."""
        record = decision_record(decision)
        copies = []
        for document in check_result_list(documents, self._description, self.k):
            metadata = {**document.metadata, METADATA_KEY: record}
            copies.append(Document(id=document.id, page_content=document.page_content, metadata=metadata))
        return copies


class KnowgateRunnable(Runnable[Any, AIMessage]):
    """Whole pipeline as a LangChain Runnable.

    Input: a question, a list of messages or `{"question": ...}`. `response_metadata` of the answer has `knowgate` (the
    decision) and `knowgate_passages`.

    Args:
        rag: The pipeline.

    Example:
        >>> KnowgateRunnable(rag).invoke("Who wrote Emma?").content  # doctest: +SKIP
    """

    def __init__(self, rag: AdaptiveRAG):
        self.rag = rag

    def invoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> AIMessage:
        return self._call_with_config(self._answer, input, config)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> AIMessage:
        return await self._acall_with_config(self._aanswer, input, config)

    def stream(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> Iterator[AIMessageChunk]:
        yield from self._transform_stream_with_config(iter([input]), self._stream_answer, config)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> AsyncIterator[Any]:
        async def iterate_input() -> AsyncIterator[Any]:
            yield input

        async for chunk in self._atransform_stream_with_config(iterate_input(), self._astream_answer, config):
            yield chunk

    def _answer(self, input: Any, run_manager: Any) -> AIMessage:
        """Answer the question in the input, and send the decision to the callbacks of the run."""
        answer = run_in_model_thread(self.rag.model, lambda: self.rag.answer(_parse_input(input, self.rag)))
        _publish(run_manager, answer.decision)
        return _make_message(answer)

    async def _aanswer(self, input: Any, run_manager: Any) -> AIMessage:
        """Do the same as `_answer`, without blocking the event loop."""
        answer = await self.rag.aanswer(await asyncio.to_thread(_parse_input, input, self.rag))
        await _apublish(run_manager, answer.decision)
        return _make_message(answer)

    def _stream_answer(self, inputs: Iterator[Any], run_manager: Any) -> Iterator[AIMessageChunk]:
        """Yield the answer to the first input in chunks. The decision goes to the callbacks of the run."""
        events = self.rag.answer_stream(_parse_input(next(inputs), self.rag))
        # `next` computes the next event; None after the last one.
        while (event := run_in_model_thread(self.rag.model, lambda: next(events, None))) is not None:
            if isinstance(event, DecisionEvent):
                _publish(run_manager, event.decision)
            yield from _make_chunks(event)

    async def _astream_answer(self, inputs: AsyncIterator[Any], run_manager: Any) -> AsyncIterator[AIMessageChunk]:
        """Do the same as `_stream_answer`, without blocking the event loop."""
        question = await asyncio.to_thread(_parse_input, await anext(inputs), self.rag)
        async for event in self.rag.aanswer_stream(question):
            if isinstance(event, DecisionEvent):
                await _apublish(run_manager, event.decision)
            for chunk in _make_chunks(event):
                yield chunk


def route(
    decider: AdaptiveRAG | Decider, *, retrieve: str = "retrieve", skip: str = "answer", key: str = "question"
) -> Runnable[Any, str]:
    """Return a conditional edge for LangGraph. The gate chooses between the nodes `retrieve` and `skip`.

    Args:
        decider: A `Decider` or an `AdaptiveRAG`.
        retrieve: The name of the node for questions that need retrieval.
        skip: The name of the node for all other questions.
        key: The key of the question in the state. If the state lacks it, the last of its `messages` is used.

    Example:
        >>> graph.add_conditional_edges(START, route(decider), ["retrieve", "answer"])  # doctest: +SKIP
    """
    source = as_decider(decider)

    def decide(state: Any, config: RunnableConfig) -> str:
        """Decide on the question in the state, send the decision to callbacks, and return the next node."""
        decision = _decide_on_state(source, state, key)
        dispatch_custom_event(DECISION_EVENT, decision_record(decision), config=config)
        return retrieve if decision.retrieve else skip

    async def adecide(state: Any, config: RunnableConfig) -> str:
        decision = await asyncio.to_thread(_decide_on_state, source, state, key)
        await adispatch_custom_event(DECISION_EVENT, decision_record(decision), config=config)
        return retrieve if decision.retrieve else skip

    return RunnableLambda(decide, afunc=adecide, name="knowgate")


def middleware(decider: AdaptiveRAG | Decider, *, hide: Sequence[str]) -> Any:
    """Return agent middleware that hides tools when no retrieval is needed. The gate decides once per run of the agent.

    Args:
        decider: A `Decider` or an `AdaptiveRAG`.
        hide: The names of the tools to hide, such as the search tool.

    Example:
        >>> create_agent(llm, tools, middleware=[middleware(open_decider(), hide=["search"])])  # doctest: +SKIP
    """
    check_framework_version("langchain", "langchain", majors=("1",))
    from langchain.agents.middleware import AgentMiddleware, AgentState

    source = as_decider(decider)

    class KnowgateState(AgentState):  # type: ignore[type-arg,misc,unused-ignore]
        knowgate: dict[str, Any]

    class KnowgateMiddleware(AgentMiddleware):  # type: ignore[type-arg,misc,unused-ignore]
        state_schema = KnowgateState

        def before_agent(self, state: Any, runtime: Any) -> dict[str, Any]:
            """Decide on the last message, and return the decision as an update of the state. Called once per run."""
            return {METADATA_KEY: decision_record(_decide_on_state(source, state, ""))}

        async def abefore_agent(self, state: Any, runtime: Any) -> dict[str, Any]:
            return await asyncio.to_thread(self.before_agent, state, runtime)

        def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
            """Send a request to the LLM without the hidden tools, if no retrieval is needed."""
            return handler(_hide_tools(request, hide))

        async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
            return await handler(_hide_tools(request, hide))

    return KnowgateMiddleware()


def _hide_tools(request: Any, names: Sequence[str]) -> Any:
    """Return the request to the LLM without the named tools. After a decision to retrieve, nothing changes."""
    decision = request.state.get(METADATA_KEY) or {}
    if decision.get("retrieve", True):
        return request
    return request.override(tools=[tool for tool in request.tools if _get(tool, "name") not in names])


def _publish(run_manager: Any, decision: Decision) -> RunnableConfig:
    """Send a decision to the callbacks of a run, and return the config with which the run calls other runnables."""
    config, record = _note_decision(run_manager, decision)
    dispatch_custom_event(DECISION_EVENT, record, config=config)
    return config


async def _apublish(run_manager: Any, decision: Decision) -> RunnableConfig:
    """Do the same as `_publish`, for the asynchronous callbacks of a run."""
    config, record = _note_decision(run_manager, decision)
    await adispatch_custom_event(DECISION_EVENT, record, config=config)
    return config


def _note_decision(run_manager: Any, decision: Decision) -> tuple[RunnableConfig, dict[str, Any]]:
    """Store a decision in the metadata of a run, where LangChain's tracers show it.

    Returns:
        The config for calls inside the run, and the decision as a dict that can be serialized.
    """
    record = decision_record(decision)
    if isinstance(run_manager.metadata, dict):
        run_manager.metadata[METADATA_KEY] = record
    return RunnableConfig(callbacks=run_manager.get_child()), record


def _decide_on_state(decider: Decider, state: Any, key: str) -> Decision:
    """Decide whether the question of a state needs retrieval.

    Without `state[key]`, the last message is the question.
    """
    question = _get(state, key) if key else None
    if question:
        return decider.decide(question)
    return decider.decide_messages(_convert_messages(_get(state, "messages") or []))


def _get(container: Any, name: str) -> Any:
    """Return an item of a mapping, or an attribute of another object, or None if it is missing."""
    return container.get(name) if isinstance(container, Mapping) else getattr(container, name, None)


def _convert_messages(messages: Sequence[Any]) -> list[dict[str, str]]:
    """Convert LangChain's messages to mappings of role and text, without tool calls and system messages."""
    pairs = [_get_role_and_text(message) for message in messages]
    return [{"role": role, "content": text} for role, text in pairs if role and text.strip()]


def _get_role_and_text(message: Any) -> tuple[str | None, str]:
    """Return role and text of a message. Other roles than user and assistant become None."""
    if isinstance(message, BaseMessage):
        return CHAT_ROLES.get(message.type), str(message.text)
    if isinstance(message, Mapping):
        return CHAT_ROLES.get(message["role"]), str(message["content"])
    role, text = message
    return CHAT_ROLES.get(role), str(text)


def _parse_input(value: Any, rag: AdaptiveRAG) -> str | Question:
    """Return the question in the input of a Runnable. A list of messages becomes one rewritten question."""
    if hasattr(value, "to_messages"):  # the output of a LangChain prompt
        value = value.to_messages()
    if isinstance(value, Mapping):
        value = value.get("question") or value.get("input") or value.get("messages")
    if isinstance(value, list | tuple):
        return run_in_model_thread(rag.model, lambda: question_from_messages(rag.model, _convert_messages(value)))
    return value  # type: ignore[no-any-return]


def _make_message(answer: Answer) -> AIMessage:
    """Convert an answer to an AI message with the decision and the passages in its metadata."""
    metadata = {METADATA_KEY: decision_record(answer.decision), **_passages_metadata(answer)}
    return AIMessage(answer.text, response_metadata=metadata)


def _make_chunks(event: Any) -> Iterator[AIMessageChunk]:
    """Convert an event of a streamed answer to message chunks. Some events give no chunk."""
    if isinstance(event, DecisionEvent):
        yield AIMessageChunk("", response_metadata={METADATA_KEY: decision_record(event.decision)})
    elif isinstance(event, TextEvent):
        yield AIMessageChunk(event.text)
    elif isinstance(event, AnswerEvent):
        yield AIMessageChunk("", response_metadata=_passages_metadata(event.answer), chunk_position="last")


def _passages_metadata(answer: Answer) -> dict[str, Any]:
    """Return the passages of an answer as metadata of a message."""
    return {f"{METADATA_KEY}_passages": [asdict(passage) for passage in answer.passages]}


# --- models and retrievers ------------------------------------------------------------------------


def open_langchain(value: str) -> LangChainModel:
    """Return the chat model with a LangChain name, such as `openai:gpt-4o-mini`.

    Append `?logprobs=true` if the model can return log-probabilities.
    """
    check_framework_version("langchain", "langchain", majors=("1",))
    from langchain.chat_models import init_chat_model

    name, _, options = value.partition("?")
    if options not in ("", "logprobs=true"):
        raise BadSetting(f"'langchain:{value}' has the unknown option '{options}'. The only option is logprobs=true.")
    with wrap_errors(f"LangChain's model '{name}'"):
        chat = init_chat_model(name)
    return LangChainModel(chat, name=f"langchain:{name}", logprobs=bool(options))


class LangChainModel(ChatModel):
    """A LangChain chat model as a knowgate model.

    Args:
        chat: The LangChain chat model.
        name: The name that identifies the model. Default: the name of the chat model.
        logprobs: Whether the chat model can return log-probabilities.
    """

    def __init__(self, chat: Any, *, name: str = "", logprobs: bool = False):
        chat_name = getattr(chat, "model_name", None) or getattr(chat, "model", None) or type(chat).__name__
        super().__init__(name or f"langchain:{chat_name}", logprobs=logprobs)
        self._chat = chat

    def _complete(self, request: ChatRequest) -> Completion:
        """Send one request, and return the answer. Chat models with only async methods work, too."""
        text = request.text
        options = self._make_options(request)
        message = call_or_await(lambda: self._chat.invoke(text, **options), lambda: self._chat.ainvoke(text, **options))
        return _make_completion(message)

    def _stream(self, request: ChatRequest) -> Generator[str, None, Completion]:
        """Yield the answer to one request piece by piece, and return it whole."""
        message = None
        for chunk in self._chat.stream(request.text, **self._make_options(request)):
            message = chunk if message is None else message + chunk  # LangChain merges chunks by addition
            if chunk.text:
                yield str(chunk.text)
        return Completion("") if message is None else _make_completion(message)


def _make_completion(message: Any) -> Completion:
    """Convert an AI message to a completion. Providers name the finish reason differently."""
    metadata: Mapping[str, Any] = getattr(message, "response_metadata", None) or {}
    usage: Mapping[str, Any] = getattr(message, "usage_metadata", None) or {}
    reason = metadata.get("finish_reason") or metadata.get("stop_reason") or metadata.get("done_reason")
    tokens = parse_logprobs(metadata.get("logprobs"))
    return make_completion(str(message.text), tokens, usage.get("output_tokens"), reason not in TRUNCATION_REASONS)


class LangChainRetriever:
    """A LangChain retriever as a knowgate retriever.

    Args:
        retriever: The LangChain retriever.
        version: Any text that identifies the documents. Change it when they change, because a guarantee holds only for
            the documents it was calibrated with.
    """

    name = "langchain"

    def __init__(self, retriever: Any, *, version: str = ""):
        self._retriever = retriever
        self.fingerprint = sha256_text("langchain", type(retriever).__qualname__, version)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return the first k passages for each query."""
        retriever = self._retriever
        texts = list(queries)
        description = f"LangChain's retriever {type(retriever).__name__}"
        with wrap_errors(description):
            results = call_or_await(lambda: retriever.batch(texts), lambda: retriever.abatch(texts))
        return [
            [_make_passage(document) for document in check_result_list(documents, description, k)]
            for documents in results
        ]


def _make_passage(document: Any) -> Passage:
    """Convert a LangChain document to a passage. A missing id becomes a hash of the text."""
    metadata = document.metadata or {}
    title = metadata.get("title") or metadata.get("source") or ""
    passage_id = document.id or metadata.get("id") or sha256_text(document.page_content)[:16]
    score = metadata.get("score", metadata.get("relevance_score"))
    score = float(score) if isinstance(score, int | float) else None
    return Passage(str(passage_id), document.page_content, str(title), score)
