from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from knowgate.errors import BadInput, BadSetting, ModelError
from knowgate.retrieval import load_retriever
from knowgate.retrieval.index import IndexReport, build_index
from knowgate.retrieval.index_folder import open_bm25, open_dense
from knowgate.types import Vector
from tests.support.retrieval_fakes import CountingEmbedder, write_records

TEXTS = {"a": "red apple", "b": "green tree", "c": "blue sky"}


def build(folder: Path, texts: dict[str, str], embedder: CountingEmbedder | None = None) -> IndexReport:
    kind = "hybrid" if embedder else "bm25"
    source = write_records(folder / "docs.jsonl", texts)
    return build_index(source, folder / "index", kind=kind, embedder=embedder)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def test_a_new_index_reports_what_it_holds(tmp_path: Path):
    assert build(tmp_path, TEXTS) == IndexReport(3, 3, 3, 0, 0, 0, {}, written=True)


def test_an_index_opens_as_the_kind_it_was_built_as(tmp_path: Path):
    build(tmp_path, TEXTS)
    retriever = load_retriever(str(tmp_path / "index"))
    assert retriever.name == "bm25"
    assert [passage.id for passage in retriever.search(["apple"], 5)[0]] == ["a"]


def test_equal_documents_give_equal_files(tmp_path: Path):
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    build(tmp_path / "x", TEXTS, CountingEmbedder())
    build(tmp_path / "y", TEXTS, CountingEmbedder())
    assert snapshot(tmp_path / "x/index") == snapshot(tmp_path / "y/index")


def test_an_update_counts_added_changed_removed_and_unchanged(tmp_path: Path):
    build(tmp_path, TEXTS)
    report = build(tmp_path, {"b": "green tree", "c": "grey sky", "d": "new", "e": "newer"})
    assert report == IndexReport(4, 4, added=2, changed=1, removed=1, unchanged=1, skipped={}, written=True)
    found = load_retriever(str(tmp_path / "index")).search(["apple", "grey"], 5)
    assert [[passage.id for passage in row] for row in found] == [[], ["c"]]


def test_an_update_embeds_only_new_and_changed_texts(tmp_path: Path):
    build(tmp_path, TEXTS, CountingEmbedder())
    again = CountingEmbedder()
    build(tmp_path, {"c": "blue sky", "a": "red apples", "d": "new text"}, again)
    assert again.seen == ["red apples", "new text"]
    vectors = np.load(tmp_path / "index/dense.npy")
    expected = [again.vector(text) for text in ["blue sky", "red apples", "new text"]]
    assert vectors == pytest.approx(np.stack(expected))


def test_an_update_that_only_removes_embeds_nothing(tmp_path: Path):
    build(tmp_path, TEXTS, CountingEmbedder())
    again = CountingEmbedder()
    build(tmp_path, {"c": "blue sky"}, again)
    assert again.seen == []
    assert np.load(tmp_path / "index/dense.npy") == pytest.approx(again.vector("blue sky")[None])


def test_another_embedder_embeds_everything(tmp_path: Path):
    build(tmp_path, TEXTS, CountingEmbedder())
    other = CountingEmbedder(width=4, fingerprint="other")
    build(tmp_path, TEXTS, other)
    assert len(other.seen) == 3


def test_another_passage_size_embeds_everything_and_counts_as_changed(tmp_path: Path):
    build(tmp_path, TEXTS, CountingEmbedder())
    again = CountingEmbedder()
    source = tmp_path / "docs.jsonl"
    report = build_index(source, tmp_path / "index", kind="hybrid", embedder=again, max_words=1)
    assert (report.changed, report.passages, len(again.seen)) == (3, 6, 6)


def test_changing_from_dense_to_hybrid_embeds_nothing(tmp_path: Path):
    source = write_records(tmp_path / "docs.jsonl", TEXTS)
    build_index(source, tmp_path / "index", kind="dense", embedder=CountingEmbedder())
    again = CountingEmbedder()
    report = build_index(source, tmp_path / "index", kind="hybrid", embedder=again)
    assert (again.seen, report.unchanged, report.written) == ([], 3, True)


def test_an_update_without_changes_leaves_the_folder_untouched(tmp_path: Path):
    build(tmp_path, TEXTS, CountingEmbedder())
    before = (tmp_path / "index").stat()
    report = build(tmp_path, TEXTS, CountingEmbedder())
    assert report == IndexReport(3, 3, 0, 0, 0, 3, {}, written=False)
    assert (tmp_path / "index").stat().st_ino == before.st_ino
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs.jsonl", "index"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError])
def test_killing_an_update_leaves_the_old_index_intact(tmp_path: Path, error: type[BaseException]):
    class Killed(CountingEmbedder):
        def embed(self, texts: Sequence[str]) -> Vector:
            raise error("stopped")

    build(tmp_path, TEXTS, CountingEmbedder())
    before = snapshot(tmp_path / "index")
    with pytest.raises(error):
        build(tmp_path, {**TEXTS, "d": "new"}, Killed())
    assert snapshot(tmp_path / "index") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs.jsonl", "index"]


def test_files_without_text_and_of_other_suffixes_are_reported(tmp_path: Path):
    (tmp_path / "docs").mkdir()
    for name, text in {"a.txt": "words", "b.txt": " ", "c.docx": "x"}.items():
        (tmp_path / "docs" / name).write_text(text)
    report = build_index(tmp_path / "docs", tmp_path / "index")
    assert (report.documents, dict(report.skipped)) == (1, {".docx": 1, "no text": 1})


def test_documents_without_any_text_are_an_error(tmp_path: Path):
    (tmp_path / "docs.jsonl").write_text("\n")
    with pytest.raises(BadInput, match="contain no text"):
        build_index(tmp_path / "docs.jsonl", tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_progress_is_reported(tmp_path: Path):
    told: list[tuple[str, int, int]] = []
    source = write_records(tmp_path / "docs.jsonl", TEXTS)
    build_index(
        source,
        tmp_path / "index",
        kind="dense",
        embedder=CountingEmbedder(),
        progress=lambda stage, done, total: told.append((stage, done, total)),
    )
    assert told == [("read", 3, 0), ("embed", 3, 3)]


# --- searching what was built ---


def test_vectors_and_passages_stay_on_disk(tmp_path: Path):
    build(tmp_path, TEXTS, CountingEmbedder())
    dense, words = open_dense(tmp_path / "index", CountingEmbedder()), open_bm25(tmp_path / "index")
    assert isinstance(dense._vectors, np.memmap)
    assert isinstance(words._matrix.scores["data"], np.memmap)
    assert words._passages[2].text == "blue sky"


def test_an_open_index_keeps_working_while_it_is_replaced(tmp_path: Path):
    build(tmp_path, TEXTS)
    retriever = open_bm25(tmp_path / "index")
    build(tmp_path, {"z": "something else"})
    assert [passage.text for passage in retriever.search(["sky"], 1)[0]] == ["blue sky"]


def test_a_moved_index_keeps_its_fingerprint(tmp_path: Path):
    build(tmp_path, TEXTS)
    before = open_bm25(tmp_path / "index").fingerprint
    shutil.move(tmp_path / "index", tmp_path / "elsewhere")
    assert open_bm25(tmp_path / "elsewhere").fingerprint == before


def test_the_fingerprint_changes_with_the_documents(tmp_path: Path):
    build(tmp_path, TEXTS)
    before = open_bm25(tmp_path / "index").fingerprint
    build(tmp_path, {**TEXTS, "a": "red pear"})
    assert open_bm25(tmp_path / "index").fingerprint != before


def test_the_faiss_file_of_an_earlier_version_is_ignored_and_replaced(tmp_path: Path):
    embedder = CountingEmbedder()
    build(tmp_path, TEXTS, embedder)
    (tmp_path / "index" / "dense.ivf").write_bytes(b"faiss")
    assert len(open_dense(tmp_path / "index", embedder).search(["red"], 3)[0]) == 3
    build(tmp_path, {**TEXTS, "a": "red pear"}, embedder)
    assert not (tmp_path / "index" / "dense.ivf").exists()


# --- settings ---


def test_an_unknown_kind_is_an_error(tmp_path: Path):
    with pytest.raises(BadSetting, match="kind='dens' is not allowed: it must be 'bm25', 'dense' or 'hybrid'"):
        build_index(tmp_path, tmp_path / "index", kind="dens")


def test_bm25_with_an_embedder_is_an_error(tmp_path: Path):
    with pytest.raises(BadSetting, match="uses no `embedder`"):
        build_index(write_records(tmp_path / "d.jsonl", TEXTS), tmp_path / "index", embedder="minilm")


def test_max_words_must_be_positive(tmp_path: Path):
    with pytest.raises(BadSetting, match="max_words=0 is not allowed"):
        build_index(tmp_path, tmp_path / "index", max_words=0)
