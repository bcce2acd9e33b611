"""LangChain and LangGraph as installed, with a scripted chat model."""

import asyncio

import pytest

pytest.importorskip("langchain", reason="needs the extra langchain")
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_core.tracers.base import BaseTracer
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from knowgate.errors import AdapterError, BadInput, KnowgateError, UnsupportedSignal
from knowgate.gates import load_gate
from knowgate.integrations.langchain import (
    DecisionRecorder,
    KnowgateRetriever,
    KnowgateRunnable,
    LangChainModel,
    LangChainRetriever,
    middleware,
    open_langchain,
    route,
)
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.types import Prompt, Signal, SignalRequest
from tests.integrations.conftest import KNOWN, UNKNOWN


class Shelf(BaseRetriever):
    """Sync, as most are."""

    found: object = None

    def _get_relevant_documents(self, query, *, run_manager):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class AsyncShelf(Shelf):
    """Async only."""

    def _get_relevant_documents(self, query, *, run_manager):
        raise NotImplementedError("async only")

    async def _aget_relevant_documents(self, query, *, run_manager):
        return self.found


DOCUMENTS = [Document(id=str(i), page_content=f"text {i}", metadata={"source": f"s{i}"}) for i in range(9)]


@pytest.fixture
def gated(decider):
    return lambda shelf, **options: KnowgateRetriever(wrapped=shelf, decider=decider, **options)


# --- the retriever --------------------------------------------------------------------------------


def test_the_retriever_returns_nothing_for_known_questions_and_reports_the_decision(gated):
    seen = DecisionRecorder()
    assert gated(Shelf(found=DOCUMENTS)).invoke(KNOWN, config={"callbacks": [seen]}) == []
    assert [(item["retrieve"], item["gate"]) for item in seen.records] == [(False, "logprob")]


class Kept(BaseTracer):
    """A tracer as LangSmith's; keeps the metadata of whole runs."""

    def __init__(self):
        super().__init__()
        self.metadata = []

    def _persist_run(self, run):
        self.metadata.append(run.metadata)


def test_tracers_see_the_decision_in_the_metadata_of_the_run(gated, rag):
    kept, config = Kept(), {"metadata": {"user": "me"}}
    gated(Shelf(found=DOCUMENTS)).invoke(KNOWN, config={**config, "callbacks": [kept]})
    KnowgateRunnable(rag).invoke(UNKNOWN, config={**config, "callbacks": [kept]})
    assert [(item["user"], item["knowgate"]["retrieve"]) for item in kept.metadata] == [("me", False), ("me", True)]
    assert config == {"metadata": {"user": "me"}}


@pytest.mark.parametrize("shelf", [Shelf(found=DOCUMENTS), AsyncShelf(found=DOCUMENTS)], ids=["sync", "async only"])
def test_the_retriever_returns_documents_with_the_decision(gated, shelf):
    seen = DecisionRecorder()
    one, two = gated(shelf, k=2).invoke(UNKNOWN, config={"callbacks": [seen]})
    assert (one.page_content, two.metadata["source"]) == ("text 0", "s1")
    assert one.metadata["knowgate"] == seen.records[0]
    assert "knowgate" not in DOCUMENTS[0].metadata


@pytest.mark.parametrize("shelf", [Shelf(found=DOCUMENTS), AsyncShelf(found=DOCUMENTS)], ids=["sync only", "async"])
def test_the_retriever_can_be_awaited(gated, shelf):
    async def both():
        seen = DecisionRecorder()
        found = [await gated(shelf).ainvoke(text, config={"callbacks": [seen]}) for text in (KNOWN, UNKNOWN)]
        return found, seen.records

    (nothing, found), records = asyncio.run(both())
    assert (len(nothing), len(found)) == (0, 9)
    assert [item["retrieve"] for item in records] == [False, True]


@pytest.mark.parametrize(
    ("found", "message"),
    [(ValueError("index gone"), "Shelf failed: ValueError: index gone"), (None, "returned NoneType instead of a list")],
)
def test_a_failing_wrapped_retriever_is_an_error(gated, found, message):
    with pytest.raises(AdapterError, match=message):
        gated(Shelf(found=found)).invoke(UNKNOWN)


def test_a_failing_gate_raises_or_falls_open(broken):
    with pytest.raises(KnowgateError):
        KnowgateRetriever(wrapped=Shelf(found=DOCUMENTS), decider=broken(False)).invoke(KNOWN)
    seen = DecisionRecorder()
    found = KnowgateRetriever(wrapped=Shelf(found=DOCUMENTS), decider=broken(True)).invoke(
        KNOWN, config={"callbacks": [seen]}
    )
    assert len(found) == 9
    assert seen.records[0]["notes"] == ["gate failed"]


# --- the agent ------------------------------------------------------------------------------------


class Scripted(GenericFakeChatModel):
    """Calls the search tool where it is shown one and has not searched yet; else answers."""

    messages: object = iter(())
    shown: list = []  # noqa: RUF012 - a field of pydantic's

    def bind_tools(self, tools, **_):
        names = [item.name for item in tools]
        return RunnableLambda(lambda messages: self.reply(messages, names))

    def invoke(self, messages, config=None, **_):
        return self.reply(messages, [])

    async def ainvoke(self, messages, config=None, **_):
        return self.reply(messages, [])

    def reply(self, messages, names):
        self.shown.append(names)
        if "search" in names and messages[-1].type == "human":
            return AIMessage("", tool_calls=[{"name": "search", "args": {"query": "canteen"}, "id": "1"}])
        return AIMessage("done")


@pytest.fixture
def agent(decider):
    searched = []

    @tool
    def search(query: str) -> str:
        """Search the handbook."""
        searched.append(query)
        return "Mira runs it."

    @tool
    def clock() -> str:
        """The time."""
        return "noon"

    llm = Scripted(shown=[])
    return create_agent(llm, [search, clock], middleware=[middleware(decider, hide=["search"])]), searched, llm


def test_an_agent_does_not_search_for_thanks_and_does_for_a_document_question(agent):
    made, searched, llm = agent
    thanks = made.invoke({"messages": [HumanMessage("thanks")]})
    assert searched == []
    assert llm.shown == [["clock"]]
    assert (thanks["knowgate"]["retrieve"], thanks["knowgate"]["rule"]) == (False, "thanks")
    asked = made.invoke({"messages": [HumanMessage(UNKNOWN)]})
    assert searched == ["canteen"]
    assert asked["knowgate"]["retrieve"] is True
    assert llm.shown[1:] == [["search", "clock"]] * 2


def test_an_agent_can_be_awaited_and_understands_a_follow_up(agent):
    made, searched, llm = agent
    messages = [HumanMessage(UNKNOWN), AIMessage("Mira"), HumanMessage("Thanks a lot!")]
    done = asyncio.run(made.ainvoke({"messages": messages}))
    assert done["knowgate"]["retrieve"] is False
    assert searched == []
    assert llm.shown == [["clock"]]


def test_an_agent_without_a_question_is_an_error(agent):
    with pytest.raises(BadInput, match="the last message must be a question of the user"):
        agent[0].invoke({"messages": []})


# --- the route ------------------------------------------------------------------------------------


class State(TypedDict, total=False):
    question: str
    messages: list
    way: list


@pytest.fixture
def graph(decider):
    made = StateGraph(State)
    made.add_node("retrieve", lambda state: {"way": ["retrieve"]})
    made.add_node("answer", lambda state: {"way": [*state.get("way", []), "answer"]})
    made.add_conditional_edges(START, route(decider), ["retrieve", "answer"])
    made.add_edge("retrieve", "answer")
    made.add_edge("answer", END)
    return made.compile()


def test_the_route_skips_retrieval_for_known_questions(graph):
    seen = DecisionRecorder()
    assert graph.invoke({"question": KNOWN}, config={"callbacks": [seen]})["way"] == ["answer"]
    assert graph.invoke({"question": UNKNOWN}, config={"callbacks": [seen]})["way"] == ["retrieve", "answer"]
    assert [item["retrieve"] for item in seen.records] == [False, True]


def test_the_route_can_be_awaited_and_reads_messages(graph):
    state = {"messages": [{"role": "user", "content": UNKNOWN}]}
    assert asyncio.run(graph.ainvoke(state))["way"] == ["retrieve", "answer"]


# --- the whole pipeline ---------------------------------------------------------------------------


def test_the_runnable_answers_with_and_without_passages(rag):
    chain = KnowgateRunnable(rag)
    seen = DecisionRecorder()
    known, unknown = chain.batch([KNOWN, {"question": UNKNOWN}], config={"callbacks": [seen]})
    assert (known.content, unknown.content) == ("William Shakespeare", "Mira")
    assert [item["retrieve"] for item in sorted(seen.records, key=lambda item: item["need"])] == [False, True]
    assert known.response_metadata["knowgate_passages"] == []
    assert unknown.response_metadata["knowgate_passages"][0]["id"] == "canteen"
    assert unknown.response_metadata["knowgate"]["retrieve"] is True
    assert (chain | StrOutputParser()).invoke([HumanMessage(KNOWN)]) == "William Shakespeare"


def test_the_runnable_streams_its_answer(rag):
    seen = DecisionRecorder()
    chunks = list(KnowgateRunnable(rag).stream(KNOWN, config={"callbacks": [seen]}))
    assert [item.content for item in chunks if item.content] == ["William", " Shakespeare"]
    whole = sum(chunks[1:], chunks[0])
    assert whole.content == "William Shakespeare"
    assert whole.response_metadata["knowgate"] == seen.records[0]


def test_the_runnable_can_be_awaited_and_streamed_at_once(rag):
    async def both():
        chain = KnowgateRunnable(rag)
        return await chain.ainvoke(UNKNOWN), [item.content async for item in chain.astream(UNKNOWN)]

    answer, pieces = asyncio.run(both())
    assert answer.content == "Mira" == "".join(pieces)


# --- theirs as ours -------------------------------------------------------------------------------


def chat(*answers):
    return LangChainModel(GenericFakeChatModel(messages=iter(answers)))


def test_a_langchain_model_is_gated_and_answers(retriever):
    model = chat("Paris", AIMessage("Lyon is", response_metadata={"finish_reason": "length"}), "Lyon is big")
    rag = AdaptiveRAG(model, load_gate("never"))
    assert rag.answer("Where?").text == "Paris"
    (reading,) = model.read([Prompt("?")], SignalRequest(draft_tokens=2))
    assert (reading.draft.text, reading.draft.finished) == ("Lyon is", False)
    assert model.generate([Prompt("?")], max_tokens=9, resume=[reading.resume])[0][0].text == "Lyon is big"


def test_a_complete_draft_costs_no_second_call():
    model = chat("Paris")
    (reading,) = model.read([Prompt("?")], SignalRequest(draft_tokens=8))
    assert model.generate([Prompt("?")], max_tokens=32, resume=[reading.resume])[0][0].text == "Paris"


def test_log_probabilities_are_parsed():
    top = [{"token": "Par", "logprob": -0.5}, {"token": "Lyon", "logprob": -1.5}]
    content = [{"token": "Par", "logprob": -0.5, "top_logprobs": top}]
    answer = AIMessage("Par", response_metadata={"logprobs": {"content": content}})
    model = LangChainModel(GenericFakeChatModel(messages=iter([answer])), logprobs=True)
    assert Signal.LOGPROBS in model.offers
    draft = model.read([Prompt("?")], SignalRequest(draft_tokens=4))[0].draft
    assert draft.tokens[0].logprob == -0.5
    assert draft.tokens[0].margin == pytest.approx(0.3834, abs=1e-4)  # e^-0.5 - e^-1.5


def test_a_langchain_model_streams_and_samples():
    model = chat("one two three", "a", "b")
    pieces = list(model.stream(Prompt("?"), max_tokens=9))
    assert "".join(pieces) == "one two three"
    assert len(pieces) > 1
    (samples,) = model.generate([Prompt("?")], max_tokens=4, temperature=1.0, n=2)
    assert {item.text for item in samples} == {"a", "b"}


def test_a_langchain_model_raises_for_signals_it_does_not_offer():
    with pytest.raises(UnsupportedSignal, match="hidden states"):
        chat("x").read([Prompt("?")], SignalRequest(layers=(1,)))
    with pytest.raises(AdapterError, match=r"StopIteration|RuntimeError"):
        chat().generate([Prompt("?")], max_tokens=3)


def test_a_missing_provider_is_an_error():
    with pytest.raises(AdapterError, match="LangChain's model 'nobody:x' failed"):
        open_langchain("nobody:x")


@pytest.mark.parametrize("kind", [Shelf, AsyncShelf])
def test_a_langchain_retriever_is_a_knowgate_retriever(kind):
    found = LangChainRetriever(kind(found=DOCUMENTS)).search(["a", "b"], 2)
    assert [[(item.id, item.text, item.title) for item in row] for row in found] == [
        [("0", "text 0", "s0"), ("1", "text 1", "s1")]
    ] * 2


def test_the_version_of_the_documents_is_in_the_fingerprint():
    one, two, same = (LangChainRetriever(Shelf(), version=text).fingerprint for text in ("1", "2", "1"))
    assert one == same != two


@pytest.mark.parametrize("found", [None, ValueError("gone")])
def test_a_failing_langchain_retriever_is_an_error(found):
    with pytest.raises(AdapterError, match="LangChain's retriever Shelf"):
        LangChainRetriever(Shelf(found=found)).search(["a"], 2)
