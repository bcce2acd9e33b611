"""Fine-tuning a judge: the schedule, the loss and where it looks, going on after an interruption."""

import math

import numpy as np
import pytest
import torch

from knowgate.errors import BadInput, BadSetting
from knowgate.fitting.judges.checkpoint import forget_training, training_folder
from knowgate.fitting.judges.ik import fit_ik, fit_ik_judge
from knowgate.fitting.judges.kbm import fit_kbm, fit_kbm_judge
from knowgate.fitting.judges.trained_model import JudgeTraining, Lesson, learning_rate, mean_loss
from knowgate.fitting.save import save_fitted
from knowgate.gates import load_gate
from knowgate.gates.fitted.judge import Judge, open_base
from knowgate.gates.kbm import KBM_LABELS, START, encode_kbm_answer
from knowgate.statistics.measures import auroc
from tests.support.judge_data import QUICK, planted, quick
from tests.support.tiny_models import save_word_llama

SHORT = JudgeTraining(epochs=2, batch=8, rate=5e-3, rank=4)


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with quick():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_word_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def judge(base):
    return Judge(open_base(f"hf:{base}"), KBM_LABELS)


def lesson(judge, text, word):
    return Lesson(encode_kbm_answer(judge, text, word), (judge.columns[KBM_LABELS.index(word)], judge.columns[1]))


# --- schedule and loss ----------------------------------------------------------------------------


def test_the_learning_rate_climbs_for_two_percent_of_the_updates_and_falls_along_a_cosine():
    rates = [learning_rate(update, 100) for update in range(100)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[51] == pytest.approx(0.5, abs=1e-9)
    assert rates[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 97 / 98)))


def test_labels_stand_right_behind_their_marks(judge):
    cut = encode_kbm_answer(judge, "a b c", "True")
    tokens = judge.model.loaded.tokenizer.convert_ids_to_tokens(cut.ids)
    assert tokens[: cut.marks[0] + 1] == ["<user>", "a", "b", "c", "<bot>", '{"', "mastery", '":', '"']
    assert tokens[cut.marks[0] + 1 :] == ["True", '",', '"', "certainty", '":', '"']
    assert cut.marks[1] == len(cut.ids) - 1


def test_known_reads_the_first_label_against_the_second_as_the_whole_model_does(judge):
    cut = judge.encode("a b c", START)
    with torch.no_grad():
        logits = judge.model.loaded.model(torch.tensor([cut.ids])).logits[0, -1].double()
    pair = logits[[judge.columns[0], judge.columns[1]]].softmax(0)
    assert judge.known([cut])[0] == pytest.approx(float(pair[0]), abs=1e-5)


def test_the_loss_is_that_of_the_label_tokens_alone_whatever_the_padding(judge):
    lessons = [lesson(judge, "a b c", "True"), lesson(judge, "a b c d e f g", "False")]
    expected = []
    for item in lessons:
        with torch.no_grad():
            rows = judge.model.loaded.model(torch.tensor([item.cut.ids])).logits[0].log_softmax(-1)
        expected += [-float(rows[mark, target]) for mark, target in zip(item.cut.marks, item.targets, strict=True)]
    with torch.no_grad():
        assert float(mean_loss(judge.model, lessons)) == pytest.approx(np.mean(expected), abs=1e-4)


# --- training -------------------------------------------------------------------------------------


def test_gradients_added_up_over_portions_train_like_a_whole_batch(base, tmp_path, monkeypatch):
    monkeypatch.setattr("knowgate.fitting.judges.trained_model.DROPOUT", 0.0)
    examples = planted(base, 60)
    whole, parts = JudgeTraining(1, 8, 1, 1e-3), JudgeTraining(1, 8, 2, 1e-3)
    notes = [
        fit_ik_judge(examples, tokens=0, training=how, work=tmp_path / str(i)).notes
        for i, how in enumerate((whole, parts))
    ]
    assert notes[0] == notes[1]


@pytest.mark.parametrize("fit", [fit_ik, fit_kbm])
def test_the_options_of_a_fit_make_its_training(base, tmp_path, fit):
    steps = []
    options = {"epochs": 2, "learning_rate": 5e-3, "accumulate": 2, "seed": 3, "full": False}
    by_options = fit(planted(base, 60), **options, work=tmp_path / "a", watch=steps.append)
    inner = {fit_ik: fit_ik_judge, fit_kbm: fit_kbm_judge}[fit]
    training = JudgeTraining(epochs=2, rate=5e-3, accumulate=2, seed=3)
    assert by_options.files == inner(planted(base, 60), training=training, work=tmp_path / "b").files
    ends = [step for step in steps if step.is_milestone]
    assert [step.words.split(",")[0] for step in ends] == ["epoch 1", "epoch 2"]
    assert (ends[-1].done, ends[-1].unit, ends[-1].stage) == (ends[-1].total, "examples", "training")


def test_an_interrupted_training_goes_on_and_ends_where_an_uninterrupted_one_does(base, tmp_path):
    examples, out = planted(base, 80), tmp_path / "gate"
    seen = []

    def stop_in_second_epoch(step):
        if step.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_ik_judge(examples, tokens=0, training=SHORT, work=training_folder(out), watch=stop_in_second_epoch)
    assert not out.exists()
    resumed = fit_ik_judge(examples, tokens=0, training=SHORT, work=training_folder(out), watch=seen.append)
    assert {step.epoch for step in seen} == {2}
    assert seen[-1].done == seen[-1].total
    assert seen[0].rate > 0
    straight = fit_ik_judge(examples, tokens=0, training=SHORT, work=tmp_path / "straight")
    assert resumed.files == straight.files
    assert resumed.notes == straight.notes
    save_fitted(resumed, examples, out)
    forget_training(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gate", "straight"]


def test_an_unfinished_training_with_other_settings_is_not_overwritten(base, tmp_path):
    examples = planted(base, 60)
    fit_ik_judge(examples, tokens=0, training=JudgeTraining(1, 8), work=tmp_path / "w")
    with pytest.raises(BadSetting, match="unfinished training with other data or settings"):
        fit_ik_judge(examples, tokens=0, training=JudgeTraining(2, 8), work=tmp_path / "w")


def test_all_weights_can_be_trained_and_the_gate_needs_its_base_no_more(tmp_path):
    base = save_word_llama(tmp_path / "base")
    examples, out = planted(base, 120), tmp_path / "gate"
    how = JudgeTraining(epochs=2, batch=8, rate=3e-3, full=True)
    fitted = fit_kbm_judge(examples, training=how, work=tmp_path / "w")
    save_fitted(fitted, examples, out)
    base.rename(tmp_path / "gone")
    test = examples.split.test.tolist()
    raw = load_gate(str(out)).raw([examples.questions[i] for i in test], [examples.readings[i] for i in test])
    assert raw == pytest.approx(fitted.raw(test), abs=1e-6)
    assert auroc(examples.needed[test], raw) > 0.95


def test_examples_longer_than_the_limit_are_left_out_and_counted(base, tmp_path):
    with pytest.raises(BadInput, match="no example to train on"):
        fit_ik_judge(planted(base, 60), tokens=0, training=JudgeTraining(max_tokens=5), work=tmp_path / "w")


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch": 0}, {"batch": 2, "accumulate": 3}, {"rate": 0.0}])
def test_settings_that_cannot_be_used_are_refused(wrong):
    with pytest.raises(BadSetting):
        JudgeTraining(**wrong)


def test_a_base_without_weights_is_refused(base, tmp_path):
    with pytest.raises(BadSetting, match="'fake' has none here"):
        fit_ik_judge(planted(base, 60), tokens=0, base="fake", training=QUICK, work=tmp_path / "w")
