"""The judge of answers: a planted rule learnt from the answer, by one judge, by several seeds, by folds."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from knowgate.data.splits import fingerprint_text
from knowgate.errors import ArtifactError
from knowgate.gates import load_gate
from knowgate.gates.answer_judge import JudgeGate
from knowgate.gates.artifacts.gate_folder import SEEN_FILE, read_artifact
from knowgate.gates.judges import encode_answers
from knowgate.gates.judges.causal_judge import list_adapter_folders
from knowgate.gates.scoring import score_questions
from knowgate.stats.metrics import auroc
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges.answer_judge import AnswerTask, make_answer_training, train_answer_judge
from knowgate.training.judges.ensemble import plan_ensemble
from knowgate.types import Question, Reading, Signal
from tests.support.judge_data import planted, quick, score_reloaded, scored_elsewhere
from tests.support.tiny_models import save_word_llama

HOW = replace(make_answer_training(6, 8, 1e-2), rank=8, patience=0)
SHORT = replace(HOW, epochs=1)  # where it does not matter how much a judge has learned


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with quick():
        yield


@dataclass(frozen=True)
class Made:
    out: Path
    examples: object
    fitted: object


def make(folder, examples, how=HOW, **crewed):
    texts = [question.text for question in examples.questions]
    members = plan_ensemble(examples.split, how, **crewed, texts=texts)
    fitted = train_answer_judge(AnswerTask("judge", 32), examples, members, work=folder / "work")
    save_fitted(fitted, examples, folder / "gate")
    return Made(folder / "gate", examples, fitted)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_word_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def examples(model):
    return planted(model, 240, by="draft")


@pytest.fixture(scope="module")
def few(model):
    return planted(model, 100, by="draft")


@pytest.fixture(scope="module")
def single(examples, tmp_path_factory):
    return make(tmp_path_factory.mktemp("single"), examples)


@pytest.fixture(scope="module")
def several(few, tmp_path_factory):
    return make(tmp_path_factory.mktemp("several"), few, SHORT, seeds=2)


@pytest.fixture(scope="module")
def folded(few, tmp_path_factory):
    return make(tmp_path_factory.mktemp("folded"), few, SHORT, folds=2)


def taken(examples, places):
    return [examples.questions[i] for i in places], [examples.readings[i] for i in places]


def test_the_judge_learns_a_rule_planted_in_the_answer(single):
    test = single.examples.split.test.tolist()
    needs = score_questions(load_gate(str(single.out)), *taken(single.examples, test))
    assert auroc(single.examples.needed[test], np.array(needs)) > 0.95


def test_a_reloaded_gate_gives_the_same_scores(single):
    test = single.examples.split.test.tolist()
    scores = score_questions(load_gate(str(single.out)), *taken(single.examples, test))
    assert score_reloaded(single.out, single.examples, test) == scores


@pytest.mark.slow
@pytest.mark.process
def test_a_new_process_gives_the_same_scores(several):
    test = several.examples.split.test.tolist()[:10]
    scores = score_questions(load_gate(str(several.out)), *taken(several.examples, test))
    assert scored_elsewhere(several.out, several.examples, test) == scores


def test_it_needs_a_draft_and_says_what_a_question_costs(single):
    gate = load_gate(str(single.out))
    assert (gate.needs, gate.request.draft_tokens) == ({Signal.DRAFT}, 32)
    assert any(note.startswith("cost per question: ") for note in gate.artifact.manifest["notes"])


def test_several_seeds_are_averaged(several):
    gate = JudgeGate.load(str(several.out))
    questions, readings = taken(several.examples, [0, 1, 2])
    raw = gate.raw(questions, readings)
    texts = [reading.draft.text for reading in readings]
    prompts = encode_answers("judge", gate.judge, questions, texts, 32)
    assert len(gate.judge.members) == 2
    votes = [gate.judge.predict_member(number, prompts) for number in range(2)]
    assert np.abs(votes[0] - votes[1]).max() > 1e-6
    assert raw == pytest.approx(1 - (votes[0] + votes[1]) / 2, abs=1e-12)


def test_with_folds_a_row_is_scored_by_the_judge_that_did_not_see_it(folded):
    members = plan_ensemble(
        folded.examples.split, HOW, folds=2, texts=[question.text for question in folded.examples.questions]
    )
    assert sorted(members[0].train + members[1].train) == list(range(100))
    gate = JudgeGate.load(str(folded.out))
    questions, readings = taken(folded.examples, [5])
    prompts = encode_answers("judge", gate.judge, questions, [readings[0].draft.text], 32)
    votes = [gate.judge.predict_member(number, prompts) for number in range(2)]
    assert abs(votes[0] - votes[1]) > 1e-4
    stranger = next(number for number, member in enumerate(members) if 5 not in member.train)
    assert folded.fitted.raw([5]) == pytest.approx(1 - votes[stranger], abs=1e-6)


def test_with_folds_every_question_counts_as_seen(folded):
    seen = (folded.out / SEEN_FILE).read_text().split()
    assert all(fingerprint_text(question.text) in seen for question in folded.examples.questions)


def test_without_tokens_it_sees_the_question_alone_and_needs_nothing(model, tmp_path):
    examples = planted(model, 60)
    fitted = train_answer_judge(
        AnswerTask("judge", 0), examples, plan_ensemble(examples.split, replace(HOW, epochs=1)), work=tmp_path / "work"
    )
    save_fitted(fitted, examples, tmp_path / "gate")
    gate = load_gate(str(tmp_path / "gate"))
    assert (gate.needs, gate.request.draft_tokens) == (frozenset(), 0)
    assert 0 <= gate.score([Question("x a?")], [Reading()])[0] <= 1


def test_open_book_answers_can_be_training_examples(model, tmp_path):
    examples = planted(model, 60, by="draft")
    short = plan_ensemble(examples.split, replace(HOW, epochs=1, checks=1), seeds=2)
    fitted = train_answer_judge(AnswerTask("judge", 32, open_book=True), examples, short, work=tmp_path / "work")
    taught = len(examples.split.train)  # every row has an open answer that says something else
    assert f"judge 1 of 2, {2 * taught} examples:" in fitted.notes


def test_a_second_adapter_that_was_changed_is_not_loaded(several, tmp_path):
    out = tmp_path / "gate"
    save_fitted(several.fitted, several.examples, out)
    second = list_adapter_folders(out / "adapter", 2)[1]
    artifact = read_artifact(out)
    with (second / "adapter_config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(ArtifactError, match="adapter-1' was changed or damaged"):
        JudgeGate(artifact).score(*taken(several.examples, [0]))
