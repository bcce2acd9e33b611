"""Settings, a pipeline built from them, and answers as JSON: as a server would use them."""

import json

import pytest

import knowgate as kg
from knowgate.pipeline.builder import apply_preset
from tests.support.hand_gate import write_gate
from tests.support.invented import write_invented


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setenv("KNOWGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return write_invented(tmp_path / "in", 4)


def test_settings_become_a_pipeline(made):
    rag = kg.build_pipeline(kg.PipelineOptions(model=made.model, gate="prompt", docs=made.docs, k=1))
    answers = rag.answer_many(made.questions)
    assert [answer.decision.retrieve for answer in answers] == [False, True, False, True]
    assert [answer.text for answer in answers] == [question.answers[0] for question in made.questions]


def test_without_a_file_settings_are_the_defaults(made):
    assert kg.load_settings() == kg.PipelineOptions()


def test_a_file_is_found_here_or_named_by_a_text(made, tmp_path):
    (tmp_path / "knowgate.toml").write_text('gate = "never"\nk = 2\n')
    (tmp_path / "other.toml").write_text("k = 5\n")
    assert kg.load_settings(k=4) == kg.PipelineOptions(gate="never", k=4)
    assert kg.load_settings(str(tmp_path / "other.toml")) == kg.PipelineOptions(k=5)


@pytest.mark.parametrize(("flag", "other"), [("index", "docs"), ("docs", "index")])
def test_a_flag_takes_the_place_of_the_other_way_to_name_documents(tmp_path, monkeypatch, flag, other):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "knowgate.toml").write_text(f'{other} = "from-the-file"\n')
    found = kg.load_settings(**{flag: "given"})
    assert str(getattr(found, flag)) == "given"
    assert getattr(found, other) is None


def test_an_answer_as_a_record_is_plain_json(made):
    rag = kg.build_pipeline(kg.PipelineOptions(model=made.model, gate="always", docs=made.docs, k=1))
    answer = rag.answer(made.questions[1].text)
    record = json.loads(json.dumps(kg.answer_record(answer, rag)))
    assert record["answer"] == made.questions[1].answers[0]
    assert (record["retrieve"], record["gate"], record["model"]) == (True, "always", "fake")
    assert [passage["id"] for passage in record["passages"]] == [answer.passages[0].id]
    assert kg.decision_record(answer.decision).items() <= record.items()


def test_a_preset_that_lacks_its_parts_is_refused(made):
    with pytest.raises(kg.KnowgateError, match="preset='cbdr' needs the folder of a fitted gate of the kind 'probe'"):
        kg.build_pipeline(kg.PipelineOptions(model=made.model, preset="cbdr", docs=made.docs))


def write_probe(folder, **changes):
    return write_gate(folder, gate="probe", options={"layer": 2, "position": "pre"}, **changes)


def test_the_preset_takes_a_probe_of_knowing_and_says_what_to_type(tmp_path):
    helped = write_probe(tmp_path / "helped", target="benefit")
    with pytest.raises(kg.KnowgateError, match=r"Fit a probe: fit\('probe', .*target='known', balanced=True"):
        apply_preset(kg.PipelineOptions(preset="cbdr", gate=str(helped)))


def test_the_preset_decides_by_the_raw_score_above_beta(tmp_path):
    probe = write_probe(tmp_path / "probe", target="known")
    (tmp_path / "aligned").mkdir()
    (tmp_path / "aligned" / "reranker.json").write_text("{}")
    settings = apply_preset(
        kg.PipelineOptions(preset="cbdr", gate=str(probe), beta=0.98, rerank=str(tmp_path / "aligned"))
    )
    assert (settings.gate, settings.threshold) == (f"{probe},verdict=own", 0.02)


def test_a_pipeline_says_what_it_is_made_of(made):
    rag = kg.build_pipeline(kg.PipelineOptions(model=made.model, gate="prompt", docs=made.docs, threshold=0.25))
    assert repr(rag) == "<AdaptiveRAG: fake, gate prompt with threshold 0.25, 3 passages from bm25>"
    assert repr(kg.AdaptiveRAG(rag.model, kg.load_gate("never"))).endswith("no documents>")
