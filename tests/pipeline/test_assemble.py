"""From settings to parts: the index in the cache."""

from concurrent.futures import ThreadPoolExecutor

from knowgate.models.fake import FakeModel
from knowgate.pipeline.builder import build_cached_index, build_pipeline
from knowgate.pipeline.settings import PipelineOptions
from knowgate.types import Signal


def test_whoever_wants_the_same_index_at_the_same_time_takes_turns(tmp_path, monkeypatch):
    monkeypatch.setenv("KNOWGATE_CACHE", str(tmp_path / "cache"))
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(f'{{"id": "d{number}", "text": "Text number {number}."}}\n' for number in range(2000)))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build_cached_index(docs, "bm25"), range(4)))
    assert len(set(found)) == 1


def test_a_model_that_returns_only_text_is_named_with_what_to_do(tmp_path, caplog):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("Rome is old.")
    model = FakeModel(name="plain", offers=frozenset({Signal.DRAFT, Signal.SAMPLES}))
    rag = build_pipeline(PipelineOptions(docs=tmp_path / "docs"), model=model)
    assert rag.decide("Who ruled Rome?").retrieve
    assert not rag.decide("Thanks!").retrieve
    (message,) = [record.message for record in caplog.records if "log-probabilities" in record.message]
    assert message.startswith("plain returns text without log-probabilities")
    assert "fit a policy with `knowgate fit`." in message
    assert "the gate `consistency`" in message
    assert "gate=" not in message  # not Python: the command line prints it, too


def test_a_named_gate_is_not_commented_on(tmp_path, caplog):
    model = FakeModel(offers=frozenset({Signal.DRAFT, Signal.SAMPLES}))
    build_pipeline(PipelineOptions(gate="never"), model=model)
    assert not [record for record in caplog.records if "log-probabilities" in record.message]
