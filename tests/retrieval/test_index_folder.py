from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from knowgate.errors import BadInput, BrokenIndex, MissingExtra
from knowgate.retrieval import load_retriever
from knowgate.retrieval.index import IndexReport, build_index
from knowgate.retrieval.index_folder import open_bm25, open_dense, open_hybrid
from tests.support.retrieval_fakes import CountingEmbedder, write_records

TEXTS = {"a": "red apple", "b": "green tree", "c": "blue sky"}


def build(folder: Path, texts: dict[str, str], embedder: CountingEmbedder | None = None) -> IndexReport:
    kind = "hybrid" if embedder else "bm25"
    source = write_records(folder / "docs.jsonl", texts)
    return build_index(source, folder / "index", kind=kind, embedder=embedder)


# --- folders that are not ours ---


def test_a_folder_with_other_files_is_never_overwritten(tmp_path: Path):
    (tmp_path / "index").mkdir()
    (tmp_path / "index/thesis.doc").write_text("years of work")
    with pytest.raises(BadInput, match="exists and is not an index"):
        build(tmp_path, TEXTS)
    assert (tmp_path / "index/thesis.doc").read_text() == "years of work"


def test_an_index_with_a_foreign_file_in_it_is_not_overwritten(tmp_path: Path):
    build(tmp_path, TEXTS)
    (tmp_path / "index/notes.txt").write_text("mine")
    with pytest.raises(BadInput, match="exists and is not an index"):
        build(tmp_path, {"a": "other"})


def test_the_index_json_of_another_tool_is_not_overwritten(tmp_path: Path):
    (tmp_path / "index").mkdir()
    (tmp_path / "index/index.json").write_text('{"pages": []}')
    with pytest.raises(BadInput, match="exists and is not an index"):
        build(tmp_path, TEXTS)


def test_a_file_instead_of_an_index_folder_is_an_error(tmp_path: Path):
    (tmp_path / "index").write_text("a file")
    with pytest.raises(BadInput, match="exists and is not an index"):
        build(tmp_path, TEXTS)


# --- broken folders ---


def break_version(index: Path) -> None:
    record = json.loads((index / "index.json").read_text())
    (index / "index.json").write_text(json.dumps({**record, "version": 99}))


BREAKS = {
    "version": break_version,
    "manifest cut off": lambda index: (index / "index.json").write_text('{"format": "know'),
    "manifest incomplete": lambda index: (index / "index.json").write_text(
        '{"format": "knowgate-index", "version": 1}'
    ),
    "passages cut off": lambda index: (index / "passages.jsonl").write_text("{"),
    "passages gone": lambda index: (index / "passages.jsonl").unlink(),
    "offsets garbage": lambda index: (index / "offsets.npy").write_bytes(b"garbage"),
    "bm25 gone": lambda index: (index / "bm25/data.csc.index.npy").unlink(),
    "bm25 of others": lambda index: np.save(index / "bm25/data.csc.index.npy", np.zeros(1, np.float32)),
    "vectors cut off": lambda index: (index / "dense.npy").write_bytes((index / "dense.npy").read_bytes()[:-4]),
    "vectors of others": lambda index: np.save(index / "dense.npy", np.zeros((1, 8), np.float32)),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_index_explains_how_to_rebuild_it_and_the_rebuild_works(tmp_path: Path, name: str):
    build(tmp_path, TEXTS, CountingEmbedder())
    index = tmp_path / "index"
    BREAKS[name](index)
    with pytest.raises(BrokenIndex, match=f"the index '{index}' cannot be opened.*Rebuild it with `knowgate index`"):
        open_hybrid(index, CountingEmbedder())
    assert build(tmp_path, TEXTS, CountingEmbedder()).added == 3
    assert open_hybrid(index, CountingEmbedder()).search(["apple"], 1)[0]


def test_an_index_that_does_not_say_whether_words_are_stemmed_is_rebuilt(tmp_path: Path):
    build(tmp_path, TEXTS)
    manifest = tmp_path / "index/index.json"
    record = json.loads(manifest.read_text())
    del record["settings"]["stem"]
    manifest.write_text(json.dumps(record))
    with pytest.raises(BrokenIndex, match=r"does not say whether words are stemmed.*Rebuild it"):
        open_bm25(tmp_path / "index")
    build(tmp_path, TEXTS)
    assert open_bm25(tmp_path / "index").search(["apple"], 1)[0]


def test_a_missing_index_explains_how_to_build_one(tmp_path: Path):
    with pytest.raises(BrokenIndex, match=r"there is no index at 'nowhere'. Build one with `knowgate index`"):
        load_retriever("nowhere")


def test_a_folder_that_is_not_an_index_is_an_error(tmp_path: Path):
    with pytest.raises(BrokenIndex, match=r"the file index\.json is missing"):
        load_retriever(str(tmp_path))


def test_a_kind_that_was_not_built_is_an_error(tmp_path: Path):
    build(tmp_path, TEXTS)
    with pytest.raises(BrokenIndex, match=r"built as 'bm25' and cannot be searched as 'dense'.*kind='hybrid'"):
        load_retriever(str(tmp_path / "index"), kind="dense")


def test_a_hybrid_index_opens_as_bm25_too(tmp_path: Path):
    build(tmp_path, TEXTS, CountingEmbedder())
    assert load_retriever(str(tmp_path / "index"), kind="bm25").name == "bm25"
    assert load_retriever(f"bm25:{tmp_path / 'index'}").name == "bm25"


def test_another_embedding_model_is_an_error(tmp_path: Path):
    build(tmp_path, TEXTS, CountingEmbedder())
    with pytest.raises(
        BrokenIndex, match=r"'counting' \(fingerprint counting-8\), but the current model has fingerprint other"
    ):
        open_dense(tmp_path / "index", CountingEmbedder(fingerprint="other"))


def test_a_stemmed_index_without_the_stemmer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("Stemmer")
    build(tmp_path, TEXTS)
    monkeypatch.setitem(sys.modules, "Stemmer", None)  # `import Stemmer` now fails
    with pytest.raises(MissingExtra, match=r"stemmed words.*knowgate\[stem\]"):
        open_bm25(tmp_path / "index")
