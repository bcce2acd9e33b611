"""From settings to parts: the index in the cache."""

from concurrent.futures import ThreadPoolExecutor

from knowgate.pipeline.builder import build_cached_index


def test_whoever_wants_the_same_index_at_the_same_time_takes_turns(tmp_path, monkeypatch):
    monkeypatch.setenv("KNOWGATE_CACHE", str(tmp_path / "cache"))
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(f'{{"id": "d{number}", "text": "Text number {number}."}}\n' for number in range(2000)))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build_cached_index(docs, "bm25"), range(4)))
    assert len(set(found)) == 1
