"""DH-ICL: the prompt, the calibration, the decision."""

from __future__ import annotations

import math

import numpy as np
import pytest

from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry
from knowgate.data.history.sqlite_store import SqliteHistory
from knowgate.errors import BadSetting
from knowgate.gates.dhicl import DhiclGate, calibrate_logits, score_logits
from knowgate.gates.scoring import bind_gate, read_questions
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Neighbor, Question, Reading
from tests.support.hash_embedder import HashEmbedder

# three examples labelled true, true, false; then the question. Columns: z_true, z_false.
LOGITS = np.array([[2.0, 5.0], [4.0, 1.0], [3.0, 1.0], [6.0, 5.0]], dtype=np.float32)
KNOWN = [True, True, False]
# deficits: true examples max(0, 5-2) = 3 and max(0, 1-4) = 0, mean 1.5; false example max(0, 3-1) = 2, mean 2


@pytest.mark.parametrize(
    ("sign", "z_true", "z_false"), [("paper", 6 - 1.5, 5 - 2.0), ("code", 6 + 1.5, 5 + 2.0), ("none", 6.0, 5.0)]
)
def test_each_sign_of_the_calibration_gives_the_value_worked_out_on_paper(sign, z_true, z_false):
    assert calibrate_logits(LOGITS, KNOWN, sign) == pytest.approx((z_true, z_false))


def test_need_is_the_sigmoid_of_unknown_against_known():
    assert score_logits(LOGITS, KNOWN, "paper") == pytest.approx(1 / (1 + math.exp(1.5)))
    assert score_logits(LOGITS, KNOWN, "none") == pytest.approx(1 / (1 + math.exp(1.0)))


def test_an_empty_class_corrects_nothing():
    assert calibrate_logits(LOGITS[[0, 3]], [True], "paper") == pytest.approx((3.0, 5.0))


def test_the_most_similar_example_is_last_and_time_sensitive_ones_are_false():
    near = (Neighbor("near", "time-sensitive", 0.9), Neighbor("far", "known", 0.1))
    (prompt,) = DhiclGate().build_label_prompts([Question("the new one")], [Reading(neighbors={"dhicl": near})])
    assert prompt.prefix.startswith("You are a student being tested.")
    assert "recently, latest, or currently" in prompt.prefix
    assert prompt.parts == (
        "Question: far\nAnswer:",
        "true\n\nQuestion: near\nAnswer:",
        "false\n\nQuestion: the new one\nAnswer:",
    )


def test_label_words_are_used_throughout():
    near = (Neighbor("a", "known", 0.9), Neighbor("b", "unknown", 0.1))
    gate = DhiclGate(words="bar/foo")
    (prompt,) = gate.build_label_prompts([Question("q")], [Reading(neighbors={"dhicl": near})])
    assert "output 'bar'" in prompt.prefix
    assert prompt.parts[1].startswith("foo")
    assert prompt.parts[2].startswith("bar")
    assert gate.labels == ("bar", "foo")


def test_a_chinese_question_gets_the_chinese_instruction():
    (prompt,) = DhiclGate().build_label_prompts([Question("谁写了红楼梦?")], [Reading(neighbors={"dhicl": ()})])
    assert prompt.prefix.startswith("你是一名正在接受测试的学生")
    assert prompt.parts == ("问题: 谁写了红楼梦?\n答案:",)


@pytest.fixture
def log(tmp_path):
    return SqliteHistory(tmp_path / "log.db", HashEmbedder())


def fill(log, model, n=30):
    scope = HistoryScope(model.fingerprint, AnswerPrompts().fingerprint)
    log.add(
        [
            LogEntry(f"Where is town {i}?", KnowledgeLabel.KNOWN if i % 2 else KnowledgeLabel.UNKNOWN, scope)
            for i in range(n)
        ]
    )


def test_a_bound_gate_scores_with_k_neighbors_and_lists_them(log):
    model = FakeModel()
    fill(log, model)
    gate = bind_gate(DhiclGate(log, k=5), model, AnswerPrompts())
    questions = [Question("Where is town 7?"), Question("Where is town 40?")]
    readings = read_questions(model, [gate], questions, AnswerPrompts())
    assert [len(reading.neighbors["dhicl"]) for reading in readings] == [5, 5]
    assert "Where is town 7?" not in [n.question for n in readings[0].neighbors["dhicl"]]
    assert all(0 <= value <= 1 for value in gate.score(questions, readings))
    assert "similar logged questions, " in gate.explain(questions, readings)[0]


def test_cold_start_uses_the_same_random_examples_for_all(log):
    model = FakeModel()
    fill(log, model)
    gate = bind_gate(DhiclGate(log, k=20, cold=True), model, AnswerPrompts())
    one, two = gate.find_neighbors([Question("Where is town 7?"), Question("Who?")])
    assert one == two
    assert len(one) == 20


def test_cold_start_never_shows_a_question_its_own_label(log):
    model = FakeModel()
    fill(log, model, n=10)
    gate = bind_gate(DhiclGate(log, k=9, cold=True), model, AnswerPrompts())
    asked = [Question(f"  where IS town {i} ") for i in range(10)]
    for question, near in zip(asked, gate.find_neighbors(asked), strict=True):
        assert len(near) == 9
        assert question.text.strip().lower() not in {n.question.lower().rstrip("?") for n in near}


def test_time_sensitive_examples_can_be_left_out(log):
    model = FakeModel()
    fill(log, model, n=5)
    scope = HistoryScope(model.fingerprint, AnswerPrompts().fingerprint)
    log.add([LogEntry(f"Where is the court {i} now?", KnowledgeLabel.TIME_SENSITIVE, scope) for i in range(30)])
    for cold in (False, True):
        gates = [DhiclGate(log, k=5, cold=cold, time_sensitive=shown) for shown in (True, False)]
        shown, left = (
            bind_gate(gate, model, AnswerPrompts()).find_neighbors([Question("Where is the court?")])[0]
            for gate in gates
        )
        assert KnowledgeLabel.TIME_SENSITIVE in {n.label for n in shown}
        assert {n.label for n in left} == {KnowledgeLabel.KNOWN, KnowledgeLabel.UNKNOWN}
        assert len(left) == 5


def test_balanced_examples_are_half_known_and_the_most_similar_comes_first(log):
    model = FakeModel()
    scope = HistoryScope(model.fingerprint, AnswerPrompts().fingerprint)
    labels = [KnowledgeLabel.KNOWN] * 4 + [KnowledgeLabel.UNKNOWN] * 40
    log.add([LogEntry(f"Where is town {i}?", label, scope) for i, label in enumerate(labels)])
    plain, balanced = (
        bind_gate(DhiclGate(log, k=8, balanced=flag), model, AnswerPrompts()).find_neighbors(
            [Question("Where is it?")]
        )[0]
        for flag in (False, True)
    )
    assert [n.label for n in balanced].count(KnowledgeLabel.KNOWN) == 4
    assert len(plain) == len(balanced) == 8
    assert [n.similarity for n in balanced] == sorted((n.similarity for n in balanced), reverse=True)


@pytest.mark.parametrize("options", [{"cold": True}, {"k": 1}])
def test_balanced_examples_need_similar_ones_and_two_of_them(options):
    with pytest.raises(BadSetting, match="balanced=true"):
        DhiclGate(balanced=True, **options)


def test_an_empty_log_says_how_to_fill_it(log):
    with pytest.raises(BadSetting, match=r"It has: none at all\. Run `knowgate label` .* `knowgate history import`"):
        bind_gate(DhiclGate(log), FakeModel(), AnswerPrompts())


def test_a_log_of_another_model_is_rejected_and_names_both_sides(log):
    fill(log, FakeModel())
    other = FakeModel({"x": {"closed": "y"}})
    with pytest.raises(BadSetting, match=f"model {other.fingerprint}.*It has: 30 for model {FakeModel().fingerprint}"):
        bind_gate(DhiclGate(log), other, AnswerPrompts())


def test_words_must_be_two():
    with pytest.raises(BadSetting, match="two words, for known and unknown"):
        DhiclGate(words="true")


@pytest.mark.slow
@pytest.mark.model
def test_the_label_logits_of_one_pass_equal_those_of_separate_passes(smollm):
    import torch

    near = tuple(Neighbor(f"Who wrote book number {i}?", "known" if i % 3 else "unknown", 0.5) for i in range(8))
    gate = DhiclGate()
    (prompt,) = gate.build_label_prompts([Question("Who wrote Hamlet?")], [Reading(neighbors={"dhicl": near})])
    one_pass = smollm.label_logits([prompt], gate.labels)[0]
    assert one_pass.shape == (9, 2)
    columns = [smollm.tokenize(label)[0] for label in gate.labels]
    ids = smollm.tokenize(prompt.prefix)
    for place, (row, part) in enumerate(zip(one_pass, prompt.parts, strict=True)):
        ids = ids + smollm.tokenize(part)
        if place not in (0, 1, 4, 8):  # a pass takes long
            continue
        with torch.inference_mode():
            alone = smollm.loaded.model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1, columns].numpy()
        np.testing.assert_allclose(row, alone, atol=1e-4)


@pytest.mark.parametrize(("logits", "said"), [([[0, 9], [0, 9]], "not to know"), ([[9, 0], [9, 0]], "expects to know")])
def test_the_explanation_gives_examples_and_expectation(logits, said):
    gate = DhiclGate("log.db", sign="none")
    near = (Neighbor("Where is town 1?", "known", 0.9, None, "gold", 1.0),)
    reading = Reading(neighbors={"dhicl": near}, labels={"dhicl": np.array(logits, dtype=float)})
    (reason,) = gate.explain([Question("Where is town 7?")], [reading])
    assert reason.startswith("shown 1 similar logged questions, 1 of them known, the LLM expects ")
    assert said in reason


def test_the_log_may_be_in_a_database_named_in_the_spec(tmp_path):
    from knowgate.data.history import open_history
    from knowgate.gates import load_gate
    from tests.support.postgres_server import postgres_server

    address = postgres_server().address()
    open_history(address, HashEmbedder()).add(
        [LogEntry("Who wrote Faust?", KnowledgeLabel.KNOWN, HistoryScope("m", "p"))]
    )
    for spec in (f"dhicl:{address}", f"dhicl:history=history:{address},k=3", f"skr:{address},k=3"):
        gate = load_gate(spec)
        assert gate.history.removeprefix("history:") == address
        with pytest.raises(BadSetting, match="has no questions answered by model"):
            gate.bind(FakeIdentity("other"), "p")
        assert gate.bind(FakeIdentity("m"), "p").scope == HistoryScope("m", "p")
    with pytest.raises(BadSetting, match="there is no log of questions at 'postgresql://postgres@/"):
        load_gate(f"dhicl:{postgres_server().address()}").bind(FakeIdentity("m"), "p")


def test_a_password_in_a_spec_is_rejected_without_being_shown():
    from knowgate.gates import load_gate

    gate = load_gate("dhicl:postgresql://me:hunter2-Xyzzy@h/db?schema=x")
    with pytest.raises(BadSetting, match=r"contains a password.* Set PGPASSWORD") as caught:
        gate.bind(FakeIdentity("m"), "p")
    assert "hunter2" not in str(caught.value)


class FakeIdentity:
    def __init__(self, fingerprint):
        self.fingerprint = fingerprint
