"""DH-ICL's tables on the fake model: what each variant comes to, and what is on record afterwards."""

from __future__ import annotations

import pytest

from knowgate.data.history.entries import KnowledgeLabel, LogEntry
from knowgate.data.history.sqlite_store import SqliteHistory
from knowgate.data.runs.records import read_needs
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.dhicl import DhiclGate
from knowgate.labels.history_entries import scope_from_settings
from knowgate.labels.labeling import label
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.papers.dhicl_tables import DhiclVariants, build_dhicl_tables
from knowgate.papers.sweeps import build_latency_table, time_gates
from knowgate.types import Passage, Question
from tests.support.counting import CountingModel
from tests.support.hash_embedder import HashEmbedder


@pytest.fixture(autouse=True)
def light_embedding(monkeypatch):
    from knowgate.retrieval.embeddings import SentenceEmbedder

    monkeypatch.setattr(SentenceEmbedder, "fingerprint", "hash")
    monkeypatch.setattr(SentenceEmbedder, "embed", lambda self, texts: HashEmbedder().embed(texts))


def questions():
    """Eight: the fake model says that it knows the first four, and knows the even ones; passages help all."""
    return [
        Question(
            f"Where is river {i}?",
            id=f"q{i}",
            answers=(f"Town{i}",) if i % 2 == 0 else (f"City{i}",),
            contexts=(Passage("p", f"River {i} is in City{i}, near Town{i}"),),
        )
        for i in range(8)
    ]


@pytest.fixture
def model():
    table = {
        f"Where is river {i}?": {"closed": f"Town{i}", "open": f"City{i} and Town{i}", "when": "near", "known": i < 4}
        for i in range(8)
    }
    return CountingModel(FakeModel(table))


@pytest.fixture
def setup(tmp_path, model):
    run = label(questions(), model=model, out=tmp_path / "run", samples=0, layers="none")
    log = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    scope = scope_from_settings(run.settings())
    log.add(
        [
            LogEntry(f"Where is lake {i}?", KnowledgeLabel.KNOWN if i % 2 else KnowledgeLabel.UNKNOWN, scope)
            for i in range(30)
        ]
    )
    log.add([LogEntry(f"Where is lord {i} now?", KnowledgeLabel.TIME_SENSITIVE, scope) for i in range(5)])
    return run.path, DhiclVariants(str(log.path), counts=(5, 20), words=("true/false", "1/2"))


def cells(text_table):
    return {row[0]: row[1:] for row in text_table.rows}


def test_every_table_shows_accuracy_and_rate_with_never_always_and_random(setup, model):
    run, variants = setup
    main, ablations, cold, counts, words = build_dhicl_tables([run], variants, model=model, other_gates=["logprob:min"])
    assert main.columns == ("gate", "run", "random", "AUROC")
    assert list(cells(main)) == ["never", "always", "logprob:min", "dhicl"]
    assert cells(main)["never"] == ("50.0 % (0.0 %)", "50.0 %", "–")
    assert cells(main)["always"] == ("100.0 % (100.0 %)", "100.0 %", "–")
    assert list(cells(ablations))[2:] == [
        "dhicl",
        "dhicl:sign=none",
        "dhicl:sign=code",
        "dhicl:time_sensitive=false",
        "dhicl:balanced=true",
        "prompt",
    ]
    assert list(cells(cold))[2:] == ["dhicl", "dhicl:cold=true"]
    assert list(cells(counts))[2:] == ["dhicl:k=5", "dhicl"]
    assert list(cells(words))[2:] == ["dhicl", "dhicl:words=1/2"]


def test_uncalibrated_cells_match_a_calculation_by_hand(setup, model):
    """The fake model claims to know rivers 0-3, of which it answers 0 and 2 right; 4-7 are retrieved for."""
    run, variants = setup
    ablations = build_dhicl_tables([run], variants, model=model)[1]
    assert cells(ablations)["dhicl:sign=none"][:2] == ("75.0 % (50.0 %)", "75.0 %")


def test_stored_decisions_are_reused_without_the_llm(setup, model):
    run, variants = setup
    first = build_dhicl_tables([run], variants, model=model)
    before = list(model.calls)
    assert build_dhicl_tables([run], variants, model=model) == first
    assert build_dhicl_tables([run], variants) == first
    assert model.calls == before
    assert {messages.about for messages in read_needs(run)} == {"log of 35 questions"}


def test_decisions_are_made_again_if_the_log_has_grown(setup, model, tmp_path):
    run, variants = setup
    build_dhicl_tables([run], variants, model=model)
    scope = scope_from_settings(
        {"model_fingerprint": model.fingerprint, "prompts_fingerprint": AnswerPrompts().fingerprint}
    )
    SqliteHistory(tmp_path / "log.db", HashEmbedder()).add([LogEntry("Where is hill 1?", KnowledgeLabel.KNOWN, scope)])
    build_dhicl_tables([run], variants, model=model)
    assert {messages.about for messages in read_needs(run)} == {"log of 36 questions"}


def test_signs_share_one_pass(setup, model):
    run, variants = setup
    messages: list[str] = []
    build_dhicl_tables([run], variants, model=model, notify=messages.append)
    assert "run: dhicl, dhicl:sign=none, dhicl:sign=code" in messages
    assert len(messages) == 7  # that one, no time-sensitive rows, balanced, no history, cold, 5 examples, other words


def test_label_words_that_the_model_rejects_are_left_out_with_a_message(setup, model, monkeypatch):
    run, variants = setup
    plain = FakeModel.label_logits

    def picky(self, prompts, labels):
        if tuple(labels) == ("1", "2"):
            raise BadSetting("the labels begin with the same token.")
        return plain(self, prompts, labels)

    monkeypatch.setattr(FakeModel, "label_logits", picky)
    messages: list[str] = []
    words = build_dhicl_tables([run], variants, model=model, notify=messages.append)[-1]
    assert any("the labels begin with the same token." in message for message in messages)
    assert cells(words)["dhicl:words=1/2"] == ("–", "–", "–")


def test_without_stored_decisions_the_error_names_the_model_to_use(setup):
    run, variants = setup
    with pytest.raises(BadInput, match=r"of gate 'dhicl'\. To let the LLM decide now, set model='fake'"):
        build_dhicl_tables([run], variants)


def test_a_run_of_another_llm_is_rejected(setup):
    run, variants = setup
    with pytest.raises(BadSetting, match=r"another LLM or other prompts: fake .* Your LLM is fake"):
        build_dhicl_tables([run], variants, model=FakeModel({"x": "y"}))


def test_a_variant_is_named_by_its_options():
    variants = DhiclVariants("log.db", k=10)
    assert variants.make_name(variants.standard) == "dhicl:k=10"
    assert variants.make_name(DhiclGate("log.db", cold=True, words="1/2")) == "dhicl:words=1/2,cold=true"


def test_gates_are_timed_without_the_warm_up_questions(model):
    latencies = time_gates(["prompt", "logprob:min"], questions(), model, AnswerPrompts())
    assert {gate: len(seconds) for gate, seconds in latencies.items()} == {"prompt": 6, "logprob:min": 6}
    assert all(min(seconds) > 0 for seconds in latencies.values())
    assert [row[0] for row in build_latency_table(latencies).rows] == ["prompt", "logprob:min"]


def test_too_few_questions_cannot_be_timed(model):
    with pytest.raises(BadInput, match="needs more than 2 questions, but got 2"):
        time_gates(["prompt"], questions()[:2], model, AnswerPrompts())


def test_a_learned_cut_stands_beside_that_of_the_paper(setup, model):
    run, variants = setup
    *_, cut = build_dhicl_tables([run], variants, model=model, cut_questions=30)
    assert cut.title.startswith("Cut learned by leave-one-out from 30 logged questions, 50.0 % known")
    assert [name.partition(" ")[2] for name in list(cells(cut))[2:]] == ["(paper)", "(learned)"]
    with pytest.raises(BadSetting, match="Set `model`"):
        build_dhicl_tables([run], variants, cut_questions=30)
