"""LlamaIndex as installed."""

import asyncio

import pytest

pytest.importorskip("llama_index.core", reason="needs the extra llamaindex")
from llama_index.core.base.response.schema import Response
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode

from knowgate.errors import AdapterError, KnowgateError
from knowgate.gates import load_gate
from knowgate.integrations.llamaindex import (
    KnowgateQueryEngine,
    KnowgateRetriever,
    LlamaIndexModel,
    LlamaIndexRetriever,
)
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.types import Prompt
from tests.integrations.conftest import KNOWN, UNKNOWN


class Shelf(BaseRetriever):
    def __init__(self, found=None):
        super().__init__()
        self.found = found

    def _retrieve(self, query_bundle):
        if isinstance(self.found, Exception):
            raise self.found
        if self.found is not None:
            return self.found
        return [
            NodeWithScore(node=TextNode(id_=str(i), text=f"text {i}", metadata={"title": "T"}), score=1 - i / 10)
            for i in range(5)
        ]


class AsyncShelf(Shelf):
    def _retrieve(self, query_bundle):
        raise NotImplementedError("async only")

    async def _aretrieve(self, query_bundle):
        return Shelf()._retrieve(query_bundle)


class Library(CustomQueryEngine):
    def custom_query(self, query_str):
        return Response(f"looked up: {query_str}", metadata={"page": 1})


@pytest.mark.parametrize("shelf", [Shelf, AsyncShelf])
def test_the_retriever_skips_and_retrieves(decider, shelf):
    retriever = KnowgateRetriever(shelf(), decider, k=2)
    assert retriever.retrieve(KNOWN) == []
    found = retriever.retrieve(UNKNOWN)
    assert [item.node.text for item in found] == ["text 0", "text 1"]
    assert found[0].node.metadata["knowgate"]["retrieve"] is True
    assert "knowgate" not in found[0].node.get_content(metadata_mode="llm")
    assert asyncio.run(retriever.aretrieve(KNOWN)) == []
    assert len(asyncio.run(retriever.aretrieve(UNKNOWN))) == 2


def test_the_query_engine_answers_known_questions_from_memory(decider):
    engine = KnowgateQueryEngine(wrapped=Library(), decider=decider)
    known, unknown = engine.query(KNOWN), engine.query(UNKNOWN)
    assert (known.response, known.metadata["knowgate"]["retrieve"]) == ("William Shakespeare", False)
    assert (unknown.response, unknown.metadata["page"]) == (f"looked up: {UNKNOWN}", 1)
    assert unknown.metadata["knowgate"]["retrieve"] is True
    assert asyncio.run(engine.aquery(KNOWN)).response == "William Shakespeare"
    assert asyncio.run(engine.aquery("thanks")).metadata["knowgate"]["rule"] == "thanks"


def test_a_llamaindex_llm_can_answer_known_questions(decider):
    engine = KnowgateQueryEngine(wrapped=Library(), decider=decider, llm=MockLLM())
    assert engine.query(KNOWN).response == KNOWN  # the mock repeats what it is told
    assert asyncio.run(engine.aquery(KNOWN)).response == KNOWN


def test_a_llamaindex_engine_runs_on_the_gated_retriever(decider):
    engine = RetrieverQueryEngine.from_args(KnowgateRetriever(Shelf(), decider), llm=MockLLM())
    assert str(engine.query(KNOWN)) == "Empty Response"  # which is why there is a query engine
    assert "text 0" in str(engine.query(UNKNOWN))


@pytest.mark.parametrize("found", [ValueError("gone"), "text"])
def test_a_failing_wrapped_retriever_is_an_error(decider, found):
    with pytest.raises((AdapterError, AttributeError), match=r"Shelf|attribute"):
        KnowgateRetriever(Shelf(found), decider).retrieve(UNKNOWN)
    with pytest.raises(AdapterError, match="LlamaIndex's retriever Shelf"):
        LlamaIndexRetriever(Shelf(found)).search(["a"], 2)


def test_a_failing_gate_raises_or_falls_open(broken):
    with pytest.raises(KnowgateError):
        KnowgateRetriever(Shelf(), broken(False)).retrieve(KNOWN)
    assert KnowgateRetriever(Shelf(), broken(True)).retrieve(KNOWN)[0].node.metadata["knowgate"]["notes"] == [
        "gate failed"
    ]


def test_llamaindex_models_and_retrievers_are_knowgate_ones():
    model = LlamaIndexModel(MockLLM(max_tokens=3))
    (row,) = model.generate([Prompt("?")], max_tokens=3)
    assert row[0].text == "text text text"
    assert "".join(model.stream(Prompt("?"), max_tokens=3)).split()[0] == "text"
    for shelf in (Shelf(), AsyncShelf()):
        rag = AdaptiveRAG(model, load_gate("always"), LlamaIndexRetriever(shelf), k=2)
        assert [(item.id, item.title, item.score) for item in rag.answer("Where?").passages] == [
            ("0", "T", 1.0),
            ("1", "T", 0.9),
        ]
