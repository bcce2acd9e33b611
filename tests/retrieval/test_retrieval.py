from __future__ import annotations

import subprocess
import sys

import pytest

from knowgate.core.registry import load_entry
from knowgate.errors import BadSetting, UnknownName
from knowgate.retrieval import RETRIEVERS, load_retriever


def test_importing_the_registry_loads_nothing_heavy():
    code = "import sys, knowgate.retrieval, knowgate.retrieval.rerankers; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not [name for name in ("'torch'", "'sentence_transformers'", "'bm25s'", "'faiss'") if name in loaded]


@pytest.mark.parametrize("name", RETRIEVERS)
def test_every_retriever_resolves(name: str):
    assert callable(load_entry(RETRIEVERS, "retriever", name))


@pytest.mark.parametrize("spec", ["http:https://x.example/s", "https://x.example/s", "http://x.example/s"])
def test_a_url_is_a_search_endpoint(spec: str):
    assert load_retriever(spec).name == "http"


def test_a_url_cannot_be_opened_as_bm25():
    with pytest.raises(BadSetting, match="cannot be opened as kind='bm25'"):
        load_retriever("https://x.example/s", kind="bm25")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownName, match=f"Known: {', '.join(sorted(RETRIEVERS))}"):
        load_retriever("sphinx:somewhere")
