"""UAR's heads learn planted rules: in the fake model's states the side of known and unknown can be seen."""

import json

import numpy as np
import pytest

from knowgate.data.runs.folder import RunFolder
from knowgate.errors import BadInput, BadSetting
from knowgate.gates import load_gate
from knowgate.gates.hidden_state import apply_head
from knowgate.gates.scoring import bind_gate, read_questions, score_questions
from knowgate.labels.grading import StringGrader
from knowgate.labels.labeler import Labeler
from knowgate.labels.options import LabelOptions
from knowgate.labels.run import run_labeling
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.stats.metrics import auroc
from knowgate.training.examples import load_examples
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.uar import fit_uar, fit_uar_heads, prefix_tensors, train_uar_head
from knowgate.types import Question

FACTS = [Question(f"fact {i:03d}?", id=str(i), answers=("right",)) for i in range(240)]
# the criteria's rules are planted on the same side of the states: True where the fake model "knows"
CRITERIA = {
    name: [
        Question(f"{name} {i:03d}?", id=f"{name}{i}", meta={"need_retrieval_by_criterion": i % 2 == 0})
        for i in range(120)
    ]
    for name in ("intent", "knowledge", "time")
}
TABLE = {
    **{q.text: {"closed": "right" if i % 3 else "wrong", "known": bool(i % 3)} for i, q in enumerate(FACTS)},
    **{q.text: {"known": q.meta["need_retrieval_by_criterion"]} for part in CRITERIA.values() for q in part},
}
MODEL = FakeModel(TABLE, width=32)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    run = tmp_path_factory.mktemp("uar") / "run"
    plan = LabelOptions(samples=0, layers=(4,), closed_book=True)
    run_labeling(RunFolder(run), FACTS, Labeler(MODEL, StringGrader(), plan), data="test")
    return load_examples([run], target="known")


@pytest.fixture(scope="module")
def fitted(examples):
    return fit_uar_heads(examples, MODEL, CRITERIA)


@pytest.fixture(scope="module")
def saved(fitted, examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted") / "uar"
    save_fitted(fitted, examples, folder)
    return folder


def heads(saved, questions):
    gate = bind_gate(load_gate(str(saved)), MODEL, AnswerPrompts())
    return gate.predict_heads(questions, read_questions(MODEL, [gate], questions, AnswerPrompts()))


def test_every_head_learns_its_rule(saved, examples):
    for name, questions in CRITERIA.items():
        truth = np.array([question.meta["need_retrieval_by_criterion"] for question in questions])
        assert ((getattr(heads(saved, questions), name) > 0.5) == truth).mean() > 0.95
    assert load_gate(str(saved)).artifact.manifest["metrics"]["auroc"]["value"] > 0.95
    unknown = np.array([i % 3 == 0 for i in range(len(FACTS))])
    assert ((heads(saved, FACTS).self_ > 0.5) == unknown).mean() > 0.95


def test_the_card_has_each_head_and_the_whole_tree(fitted):
    assert [note.split(":")[0] for note in fitted.notes[:3]] == ["head intent", "head knowledge", "head time"]
    assert "the whole tree has AUROC" in fitted.notes[3]


def test_a_loaded_gate_gives_the_same_needs(saved):
    def needs():
        gate = bind_gate(load_gate(str(saved)), MODEL, AnswerPrompts())
        return score_questions(gate, FACTS, read_questions(MODEL, [gate], FACTS, AnswerPrompts()))

    assert needs() == needs()
    assert len(set(needs())) > 100


def test_fitting_twice_gives_the_same_weights(examples, fitted):
    again = fit_uar_heads(examples, MODEL, CRITERIA)
    assert all(np.array_equal(block, again.tensors[name]) for name, block in fitted.tensors.items())


def test_the_fit_of_the_table_reads_models_and_questions_by_their_specs(examples, fitted, tmp_path, monkeypatch):
    for name, questions in CRITERIA.items():
        lines = [json.dumps({"id": q.id, "question": q.text, "meta": q.meta}) for q in questions]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    specs = ",".join(f"{name}=jsonl:{tmp_path / name}.jsonl" for name in CRITERIA)
    opened, steps = [], []
    monkeypatch.setattr("knowgate.training.uar.load_model", lambda spec: opened.append(spec) or MODEL)
    again = fit_uar(examples, criteria=specs, watch=steps.append)
    assert opened == [examples.settings["model"]]
    assert all(np.array_equal(block, again.tensors[name]) for name, block in fitted.tensors.items())
    assert [(step.stage, step.done, step.total) for step in steps[:2]] == [
        ("reading intent", 64, 120),
        ("reading intent", 120, 120),
    ]


def test_another_model_than_the_label_run_is_refused(examples):
    with pytest.raises(BadSetting, match="Your LLM is other"):
        fit_uar_heads(examples, FakeModel(TABLE, name="other", width=32), CRITERIA)


def test_a_missing_criterion_is_named(examples):
    with pytest.raises(BadSetting, match=r"needs question sets for intent, knowledge, time\. `criteria` has: intent"):
        fit_uar_heads(examples, MODEL, {"intent": CRITERIA["intent"]})


def test_questions_without_a_verdict_and_too_few_of_a_kind_are_refused(examples):
    with pytest.raises(BadInput, match="need_retrieval_by_criterion"):
        fit_uar_heads(examples, MODEL, {**CRITERIA, "intent": FACTS})
    with pytest.raises(
        BadInput, match=r"there are 60 questions that need retrieval by 'time' and 0 questions that do not"
    ):
        fit_uar_heads(examples, MODEL, {**CRITERIA, "time": CRITERIA["time"][::2]})


def test_a_run_without_the_last_layer_is_refused(tmp_path):
    plan = LabelOptions(samples=0, layers=(2,), closed_book=True)
    run_labeling(RunFolder(tmp_path / "run"), FACTS, Labeler(MODEL, StringGrader(), plan), data="test")
    with pytest.raises(BadSetting, match="layers='last'"):
        fit_uar_heads(load_examples([tmp_path / "run"], target="known"), MODEL, CRITERIA)


def planted_states(width, *, spread, seed):
    """States as LLMs have them, a few numbers a hundred times the size of others, and a faint rule on 5 or all."""
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((2_600, width))
    if spread:
        states = rng.standard_normal((2_600, 20)) @ rng.standard_normal((20, width)) / 4.5 + 0.5 * states
    rule = states @ rng.standard_normal(width) if spread else states[:, 3:8].sum(axis=1)
    size = np.exp(rng.standard_normal(width)) * np.where(np.arange(width) < 3, 100, 1)
    truth = rng.random(2_600) < 1 / (1 + np.exp(1 - 2 * rule / rule.std()))
    return (size * (states + 5 * rng.standard_normal(width))).astype(np.float32), truth


@pytest.mark.parametrize(("width", "spread"), [(64, False), (256, False), (576, True)])
def test_on_600_rows_a_head_reaches_a_standardised_logistic_regression(width, spread):
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    states, truth = planted_states(width, spread=spread, seed=width)
    learnt, fresh = slice(0, 600), slice(600, None)
    head = train_uar_head(states[learnt], truth[learnt])
    scaler = StandardScaler().fit(states[learnt])
    rivals = [
        LogisticRegression(C=strength, max_iter=1_000).fit(scaler.transform(states[learnt]), truth[learnt])
        for strength in (0.001, 0.1, 1.0)
    ]
    best = max(auroc(truth[fresh], one.decision_function(scaler.transform(states[fresh]))) for one in rivals)
    found = auroc(truth[fresh], apply_head(prefix_tensors("self", head), "self", states[fresh]))
    assert best > 0.65
    assert found > best - 0.02
