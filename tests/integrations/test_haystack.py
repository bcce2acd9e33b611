"""Haystack as installed."""

import asyncio
import json

import pytest

pytest.importorskip("haystack", reason="needs the extra haystack")
from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from knowgate.errors import KnowgateError
from knowgate.integrations.haystack import KnowgateGate
from tests.integrations.conftest import KNOWN, TABLE, UNKNOWN


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "table.json").write_text(json.dumps(TABLE), encoding="utf-8")
    return {"model": f"fake:{tmp_path / 'table.json'}", "gate": "logprob:mean"}


def build(settings):
    store = InMemoryDocumentStore()
    store.write_documents([Document(content="Mira runs the canteen of Balaland."), Document(content="A hut.")])
    pipeline = Pipeline()
    pipeline.add_component("gate", KnowgateGate(settings=settings))
    pipeline.add_component("retriever", InMemoryBM25Retriever(store, top_k=1))
    pipeline.connect("gate.retrieve", "retriever.query")
    return pipeline


def test_a_pipeline_skips_the_retriever_for_known_questions(settings):
    pipeline = build(settings)
    known = pipeline.run({"gate": {"query": KNOWN}})
    assert (known["gate"]["skip"], "retriever" in known) == (KNOWN, False)
    unknown = pipeline.run({"gate": {"query": UNKNOWN}})
    assert unknown["retriever"]["documents"][0].content == "Mira runs the canteen of Balaland."
    assert unknown["gate"]["need"] > 0.5
    assert unknown["gate"]["decision"]["retrieve"] is True


def test_a_pipeline_with_the_gate_is_saved_and_loaded(settings):
    again = Pipeline.loads(build(settings).dumps(), allowed_modules=["knowgate.integrations.haystack"])
    assert again.run({"gate": {"query": KNOWN}})["gate"]["skip"] == KNOWN
    assert again.get_component("gate").settings == settings


def test_the_gate_can_be_awaited(settings):
    made = KnowgateGate(settings=settings)
    assert asyncio.run(made.run_async(UNKNOWN))["retrieve"] == UNKNOWN
    pipeline = build(settings)
    assert "retriever" in asyncio.run(pipeline.run_async({"gate": {"query": UNKNOWN}}))


def test_an_invalid_setting_is_an_error_when_the_pipeline_warms_up():
    with pytest.raises(KnowgateError, match="unknown gate 'nothing'"):
        KnowgateGate(settings={"model": "fake", "gate": "nothing"}).warm_up()
