from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from knowgate.errors import MissingExtra
from knowgate.retrieval import load_retriever
from knowgate.retrieval.embeddings import SentenceEmbedder
from knowgate.retrieval.index import build_index
from tests.support.extras import needs_local
from tests.support.retrieval_fakes import write_records


def test_embedding_without_sentence_transformers_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtra, match=r"knowgate\[local\]"):
        SentenceEmbedder(str(tmp_path)).embed(["text"])


@needs_local
def test_the_fingerprint_of_a_folder_depends_on_its_files_and_not_on_its_path(tmp_path: Path):
    for name in ["x", "y", "z"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"other" if name == "z" else b"weights")
    x, y, z = (SentenceEmbedder(str(tmp_path / name)).fingerprint for name in "xyz")
    assert x == y != z


@pytest.mark.model
def test_the_embedded_model_finds_by_meaning(tmp_path: Path):
    texts = {"cat": "A kitten sleeps on the sofa.", "car": "The engine of the lorry broke down."}
    source = write_records(tmp_path / "docs.jsonl", texts)
    build_index(source, tmp_path / "index", kind="dense")
    found = load_retriever(str(tmp_path / "index")).search(["young feline pet", "vehicle repair"], 1)
    assert [row[0].id for row in found] == ["cat", "car"]
    lengths = np.linalg.norm(np.load(tmp_path / "index/dense.npy"), axis=1)
    assert lengths == pytest.approx(np.ones(2), abs=1e-5)
