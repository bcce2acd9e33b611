"""LangChain and LangGraph: a retriever that looks up only what it must, agent middleware that hides the search tool, a
route, and the whole pipeline as a Runnable (extra `langchain`).

Callbacks get each decision as the custom event `knowgate_decision`. LangChain's own models and retrievers as
knowgate's are in `langchain_parts.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, adispatch_custom_event, dispatch_custom_event
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from knowgate.core.files import sha256_text
from knowgate.core.frameworks import check_framework_version, check_result_list, run_coroutine, wrap_errors
from knowgate.errors import BadSetting
from knowgate.integrations.chat_model import ChatModel, ChatRequest, parse_logprobs
from knowgate.integrations.decider import Decider, as_decider, run_in_model_thread
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import decision_record
from knowgate.pipeline.conversation import question_from_messages
from knowgate.types import (
    Answer,
    AnswerEvent,
    Completion,
    Decision,
    DecisionEvent,
    Passage,
    Question,
    StreamEvent,
    TextEvent,
)

check_framework_version("langchain-core", "langchain", majors=("1",))


DECISION_EVENT = "knowgate_decision"
METADATA_KEY = "knowgate"  # of metadata and state
CHAT_ROLES = {"human": "user", "ai": "assistant", "user": "user", "assistant": "assistant"}


class DecisionRecorder(BaseCallbackHandler):
    """A callback that keeps the decisions of a run, in order: `invoke(..., config={"callbacks": [seen]})`."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        if name == DECISION_EVENT:
            self.records.append(data)


class KnowgateRetriever(BaseRetriever):
    """A retriever that asks `wrapped` only where the gate says so, and else finds nothing.

    Documents carry the decision in `metadata["knowgate"]`; where there are none, too, callbacks get it and the metadata
    of the run has it. k: the most documents that are handed on.

    Example:
        >>> retriever = KnowgateRetriever(wrapped=mine, decider=open_decider())  # doctest: +SKIP
    """

    wrapped: Any
    decider: Any
    k: int | None = None

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        decision, config = as_decider(self.decider).decide(query), _child(run_manager)
        dispatch_custom_event(DECISION_EVENT, _noted(run_manager, decision), config=config)
        if not decision.retrieve:
            return []
        with wrap_errors(self._what):
            try:
                found = self.wrapped.invoke(query, config)
            except NotImplementedError:  # async only
                found = run_coroutine(self.wrapped.ainvoke(query))
        return self._marked(found, decision)

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        decision, config = await as_decider(self.decider).adecide(query), _child(run_manager)
        await adispatch_custom_event(DECISION_EVENT, _noted(run_manager, decision), config=config)
        if not decision.retrieve:
            return []
        with wrap_errors(self._what):
            found = await self.wrapped.ainvoke(query, config)
        return self._marked(found, decision)

    @property
    def _what(self) -> str:
        return f"the wrapped retriever {type(self.wrapped).__name__}"

    def _marked(self, found: Any, decision: Decision) -> list[Document]:
        record = decision_record(decision)
        return [
            Document(id=one.id, page_content=one.page_content, metadata={**one.metadata, METADATA_KEY: record})
            for one in check_result_list(found, self._what, self.k)
        ]


class KnowgateRunnable(Runnable[Any, AIMessage]):
    """The whole pipeline: a question, messages or `{"question": ...}` in, an AI message out; streams word by word.

    The decision is in `response_metadata["knowgate"]`, the passages shown to the LLM in `["knowgate_passages"]`.

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
        yield from self._transform_stream_with_config(iter([input]), self._pieces, config)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> AsyncIterator[Any]:
        async def given() -> AsyncIterator[Any]:
            yield input

        async for piece in self._atransform_stream_with_config(given(), self._apieces, config):
            yield piece

    def _answer(self, input: Any, run_manager: Any) -> AIMessage:
        answer = run_in_model_thread(self.rag.model, lambda: self.rag.answer(_question(input, self.rag)))
        dispatch_custom_event(DECISION_EVENT, _noted(run_manager, answer.decision), config=_child(run_manager))
        return AIMessage(answer.text, response_metadata={**_told(answer.decision), **_shown(answer)})

    async def _aanswer(self, input: Any, run_manager: Any) -> AIMessage:
        answer = await self.rag.aanswer(await asyncio.to_thread(_question, input, self.rag))
        await adispatch_custom_event(DECISION_EVENT, decision_record(answer.decision), config=_child(run_manager))
        return AIMessage(answer.text, response_metadata={**_told(answer.decision), **_shown(answer)})

    def _pieces(self, inputs: Iterator[Any], run_manager: Any) -> Iterator[AIMessageChunk]:
        events = self.rag.answer_stream(_question(next(inputs), self.rag))
        while (event := run_in_model_thread(self.rag.model, lambda: next(events, None))) is not None:
            if isinstance(event, DecisionEvent):
                dispatch_custom_event(DECISION_EVENT, _noted(run_manager, event.decision), config=_child(run_manager))
            yield from _chunk(event)

    async def _apieces(self, inputs: AsyncIterator[Any], run_manager: Any) -> AsyncIterator[AIMessageChunk]:
        question = await asyncio.to_thread(_question, await anext(inputs), self.rag)
        async for event in self.rag.aanswer_stream(question):
            if isinstance(event, DecisionEvent):
                await adispatch_custom_event(
                    DECISION_EVENT, _noted(run_manager, event.decision), config=_child(run_manager)
                )
            for chunk in _chunk(event):
                yield chunk


def route(
    decider: AdaptiveRAG | Decider, *, retrieve: str = "retrieve", skip: str = "answer", key: str = "question"
) -> Runnable[Any, str]:
    """A route of LangGraph, `add_conditional_edges(START, route(decider), ["retrieve", "answer"])`: the node to go to.

    The question is the state's `key`; without one, the last of its `messages`.
    """
    chosen = as_decider(decider)

    def name(decision: Decision) -> str:
        return retrieve if decision.retrieve else skip

    def decide(state: Any, config: RunnableConfig) -> str:
        decision = _decide_state(chosen, state, key)
        dispatch_custom_event(DECISION_EVENT, decision_record(decision), config=config)
        return name(decision)

    async def adecide(state: Any, config: RunnableConfig) -> str:
        decision = await asyncio.to_thread(_decide_state, chosen, state, key)
        await adispatch_custom_event(DECISION_EVENT, decision_record(decision), config=config)
        return name(decision)

    return RunnableLambda(decide, afunc=adecide, name="knowgate")


def middleware(decider: AdaptiveRAG | Decider, *, hide: Sequence[str]) -> Any:
    """Middleware of an agent: the tools named in `hide` are not shown to the LLM where nothing need be looked up.

    Decided once for each thing the user says; the state has the decision under `knowgate`.

    Example:
        >>> create_agent(llm, tools, middleware=[middleware(open_decider(), hide=["search"])])  # doctest: +SKIP
    """
    check_framework_version("langchain", "langchain", majors=("1",))
    from langchain.agents.middleware import AgentMiddleware, AgentState

    class KnowgateState(AgentState):  # type: ignore[type-arg,misc,unused-ignore]
        knowgate: dict[str, Any]

    return type("KnowgateMiddleware", (_Hiding, AgentMiddleware), {"state_schema": KnowgateState})(
        as_decider(decider), frozenset(hide)
    )


class _Hiding:
    """The methods of the middleware."""

    tools: Sequence[Any] = ()

    def __init__(self, decider: Decider, hide: frozenset[str]):
        super().__init__()
        self.decider, self.hide = decider, hide

    def before_agent(self, state: Any, runtime: Any) -> dict[str, Any]:
        return {METADATA_KEY: decision_record(_decide_state(self.decider, state, ""))}

    async def abefore_agent(self, state: Any, runtime: Any) -> dict[str, Any]:
        return {METADATA_KEY: decision_record(await asyncio.to_thread(_decide_state, self.decider, state, ""))}

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(self._shown(request))

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        return await handler(self._shown(request))

    def _shown(self, request: Any) -> Any:
        if (request.state.get(METADATA_KEY) or {}).get("retrieve", True):
            return request
        return request.override(tools=[tool for tool in request.tools if _name(tool) not in self.hide])


def _name(tool: Any) -> str:
    return str(tool.get("name", "")) if isinstance(tool, Mapping) else str(tool.name)


def _noted(run_manager: Any, decision: Decision) -> dict[str, Any]:
    """The decision as JSON; it is also in the metadata of the run, where tracers show it."""
    record = decision_record(decision)
    if isinstance(run_manager.metadata, dict):
        run_manager.metadata[METADATA_KEY] = record
    return record


def _child(run_manager: Any) -> RunnableConfig:
    return RunnableConfig(callbacks=run_manager.get_child())


def _decide_state(decider: Decider, state: Any, key: str) -> Decision:
    asked = _held(state, key) if key else None
    return decider.decide(asked) if asked else decider.decide_messages(_messages(_held(state, "messages") or []))


def _held(state: Any, name: str) -> Any:
    return state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)


def _messages(messages: Sequence[Any]) -> list[dict[str, str]]:
    """What user and assistant said, in words; tool calls and system messages are no part of it."""
    told = [(CHAT_ROLES.get(one.type), _text(one)) if isinstance(one, BaseMessage) else _plain(one) for one in messages]
    return [{"role": role, "content": text} for role, text in told if role and text.strip()]


def _plain(message: Any) -> tuple[str | None, str]:
    role, content = (message["role"], message["content"]) if isinstance(message, Mapping) else message
    return CHAT_ROLES.get(role), str(content)


def _text(message: BaseMessage) -> str:
    return str(message.text)


def _question(given: Any, rag: AdaptiveRAG) -> str | Question:
    if hasattr(given, "to_messages"):
        given = given.to_messages()
    if isinstance(given, Mapping):
        given = given.get("question") or given.get("input") or given.get("messages")
    if isinstance(given, list | tuple):
        return run_in_model_thread(rag.model, lambda: question_from_messages(rag.model, _messages(given)))
    return given  # type: ignore[no-any-return]  # the pipeline says what is wrong with anything else


def _chunk(event: StreamEvent) -> Iterator[AIMessageChunk]:
    if isinstance(event, DecisionEvent):
        yield AIMessageChunk("", response_metadata=_told(event.decision))
    elif isinstance(event, TextEvent):
        yield AIMessageChunk(event.text)
    elif isinstance(event, AnswerEvent):
        yield AIMessageChunk("", response_metadata=_shown(event.answer), chunk_position="last")


def _told(decision: Decision) -> dict[str, Any]:
    return {METADATA_KEY: decision_record(decision)}


def _shown(answer: Answer) -> dict[str, Any]:
    return {f"{METADATA_KEY}_passages": [_record(passage) for passage in answer.passages]}


def _record(passage: Passage) -> dict[str, Any]:
    return {"id": passage.id, "title": passage.title, "text": passage.text, "score": passage.score}


TRUNCATION_REASONS = ("length", "max_tokens", "MAX_TOKENS")  # reasons of an answer that was cut


def open_langchain(value: str) -> LangChainModel:
    """`langchain:openai:gpt-4o-mini`, what `init_chat_model` takes; `...?logprobs=true` where it gives them."""
    check_framework_version("langchain", "langchain", majors=("1",))
    from langchain.chat_models import init_chat_model

    name, _, options = value.partition("?")
    if options not in ("", "logprobs=true"):
        raise BadSetting(f"'langchain:{value}' has the option '{options}'; allowed: logprobs=true.")
    with wrap_errors(f"LangChain's model '{name}'"):
        chat = init_chat_model(name)
    return LangChainModel(chat, name=f"langchain:{name}", logprobs=bool(options))


class LangChainModel(ChatModel):
    """Any chat model of LangChain's. logprobs: it gives token log-probabilities when they are asked for."""

    def __init__(self, chat: Any, *, name: str = "", logprobs: bool = False):
        check_framework_version("langchain-core", "langchain", majors=("1",))
        own = getattr(chat, "model_name", None) or getattr(chat, "model", None) or type(chat).__name__
        super().__init__(name or f"langchain:{own}", logprobs=logprobs)
        self._chat = chat

    def _ask(self, asked: ChatRequest) -> Completion:
        try:
            return _completion(self._chat.invoke(asked.text, **self._options(asked)), asked)
        except NotImplementedError:  # async only
            return _completion(run_coroutine(self._chat.ainvoke(asked.text, **self._options(asked))), asked)

    def _ask_in_parts(self, asked: ChatRequest) -> Generator[str, None, Completion]:
        whole = None
        for chunk in self._chat.stream(asked.text, **self._options(asked)):
            whole = chunk if whole is None else whole + chunk
            if chunk.text:
                yield str(chunk.text)
        return Completion("") if whole is None else _completion(whole, asked)

    def _options(self, asked: ChatRequest) -> dict[str, Any]:
        options: dict[str, Any] = {"max_tokens": asked.max_tokens, "temperature": asked.temperature}
        options |= {"top_p": asked.top_p} if asked.temperature else {}
        options |= {"seed": asked.seed} if asked.seed is not None else {}
        return options | ({"logprobs": True, "top_logprobs": 2} if self._logprobs else {})


def _completion(message: Any, asked: ChatRequest) -> Completion:
    about: Mapping[str, Any] = getattr(message, "response_metadata", None) or {}
    usage: Mapping[str, Any] = getattr(message, "usage_metadata", None) or {}
    text = str(message.text)
    tokens = parse_logprobs(about.get("logprobs"))
    n_tokens = int(usage.get("output_tokens") or (len(tokens) if tokens else len(text.split())))
    reason = about.get("finish_reason") or about.get("stop_reason") or about.get("done_reason")
    return Completion(text, tokens, finished=reason not in TRUNCATION_REASONS, n_tokens=n_tokens)


class LangChainRetriever:
    """Any retriever of LangChain's as knowgate's. version: of its documents, where you know one: a guarantee on a
    threshold holds for one version only."""

    name = "langchain"

    def __init__(self, retriever: Any, *, version: str = ""):
        check_framework_version("langchain-core", "langchain", majors=("1",))
        self._retriever = retriever
        self.fingerprint = sha256_text("langchain", type(retriever).__qualname__, version)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        what = f"LangChain's retriever {type(self._retriever).__name__}"
        with wrap_errors(what):
            try:
                found = self._retriever.batch(list(queries))
            except NotImplementedError:  # async only
                found = run_coroutine(self._retriever.abatch(list(queries)))
        return [[_passage(one) for one in check_result_list(row, what, k)] for row in found]


def _passage(document: Any) -> Passage:
    about = document.metadata or {}
    title = about.get("title") or about.get("source") or ""
    score = about.get("score", about.get("relevance_score"))
    name = document.id or about.get("id") or sha256_text(document.page_content)[:16]
    return Passage(
        str(name), document.page_content, str(title), float(score) if isinstance(score, int | float) else None
    )
