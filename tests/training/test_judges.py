"""Fine-tuning a judge: the schedule, the loss and where it looks, going on after an interruption."""

import math
import re

import numpy as np
import pytest
import torch

from knowgate.errors import BadInput, BadSetting, OutOfMemory, UnknownName
from knowgate.gates import load_gate
from knowgate.gates.judges.causal_judge import CausalJudge, load_judge_base
from knowgate.gates.kbm import KBM_LABELS, MASTERY_START, encode_kbm_answer
from knowgate.models.tokenization import LabelPromptTokens
from knowgate.stats.metrics import auroc
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges.answer_judge import make_answer_training
from knowgate.training.judges.checkpoint import checkpoint_folder, delete_checkpoint
from knowgate.training.judges.ik import fit_ik
from knowgate.training.judges.kbm import fit_kbm
from knowgate.training.judges.trainable_models import (
    BatchOutput,
    TrainableCausalModel,
    TrainingExample,
    make_answer_judge_spec,
)
from knowgate.training.judges.trainer import train_judge
from knowgate.training.judges.training_options import JudgeTrainingOptions, one_cycle, warm_cosine
from tests.support.judge_data import QUICK, planted, quick
from tests.support.tiny_models import save_word_llama

SHORT = JudgeTrainingOptions(epochs=2, batch=8, rate=5e-3, rank=4)


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with quick():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_word_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def judge(base):
    return CausalJudge(load_judge_base(f"hf:{base}"), KBM_LABELS)


def lesson(judge, text, word):
    return TrainingExample(encode_kbm_answer(judge, text, word), (float(word == "True"), 0.0))


# --- schedule and loss ----------------------------------------------------------------------------


def test_the_learning_rate_climbs_for_two_percent_of_the_updates_and_falls_along_a_cosine():
    rates = [warm_cosine(update, 100) for update in range(100)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[51] == pytest.approx(0.5, abs=1e-9)
    assert rates[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 97 / 98)))


def test_labels_stand_right_behind_their_marks(judge):
    cut = encode_kbm_answer(judge, "a b c", "True")
    tokens = judge.model.loaded.tokenizer.convert_ids_to_tokens(cut.ids)
    assert tokens[: cut.positions[0] + 1] == ["<user>", "a", "b", "c", "<bot>", '{"', "mastery", '":', '"']
    assert tokens[cut.positions[0] + 1 :] == ["True", '",', '"', "certainty", '":', '"']
    assert cut.positions[1] == len(cut.ids) - 1


def test_known_reads_the_first_label_against_the_second_as_the_whole_model_does(judge):
    cut = judge.encode("a b c", MASTERY_START)
    with torch.no_grad():
        logits = judge.model.loaded.model(torch.tensor([cut.ids])).logits[0, -1].double()
    pair = logits[[judge.label_tokens[0], judge.label_tokens[1]]].softmax(0)
    assert judge.predict_known([cut])[0] == pytest.approx(float(pair[0]), abs=1e-5)


def test_the_loss_is_that_of_the_label_tokens_alone_whatever_the_padding(judge):
    examples = [lesson(judge, "a b c", "True"), lesson(judge, "a b c d e f g", "False")]
    expected = []
    for item in examples:
        with torch.no_grad():
            rows = judge.model.loaded.model(torch.tensor([item.prompt.ids])).logits[0].log_softmax(-1)
        targets = [judge.label_tokens[0 if share else 1] for share in item.targets]
        expected += [-float(rows[mark, target]) for mark, target in zip(item.prompt.positions, targets, strict=True)]
    model = TrainableCausalModel(judge, whole_vocabulary=True)
    with torch.no_grad():
        assert float(model.compute_output(examples).loss) == pytest.approx(np.mean(expected), abs=1e-4)


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fit", "training", "looks"),
    [
        (fit_ik, make_answer_training(1, 32, 5e-4, seed=3), ["0.5", "1"]),
        (fit_kbm, JudgeTrainingOptions(epochs=2, rate=5e-4, seed=3), ["1", "2"]),
    ],
)
def test_the_options_of_a_fit_make_its_training(base, tmp_path, fit, training, looks):
    steps = []
    options = {"epochs": training.epochs, "learning_rate": 5e-4, "seed": 3, "full": False}
    by_options = fit(planted(base, 60), **options, work=tmp_path / "a", watch=steps.append)
    assert by_options.files == fit(planted(base, 60), training=training, work=tmp_path / "b").files
    ends = [step for step in steps if step.is_milestone]
    assert [step.words.split(",")[0] for step in ends] == [f"epoch {look}" for look in looks]
    assert (ends[-1].done, ends[-1].unit, ends[-1].stage) == (ends[-1].total, "examples", "training")


def untimed(note):
    return re.sub(r"trained for \d+ s", "", note)


def test_an_interrupted_training_continues_and_ends_where_an_uninterrupted_one_does(base, tmp_path):
    examples, out = planted(base, 80), tmp_path / "gate"
    seen = []

    def stop_in_second_epoch(step):
        if step.words.startswith("epoch 2,"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_ik(examples, tokens=0, training=SHORT, work=checkpoint_folder(out), watch=stop_in_second_epoch)
    assert not out.exists()
    resumed = fit_ik(examples, tokens=0, training=SHORT, work=checkpoint_folder(out), watch=seen.append)
    assert all(re.fullmatch(r"epoch 2, loss .*, \d+\.\d examples/s", step.words) for step in seen)
    assert seen[-1].done == seen[-1].total
    straight = fit_ik(examples, tokens=0, training=SHORT, work=tmp_path / "straight")
    assert resumed.files == straight.files
    assert [untimed(note) for note in resumed.notes] == [untimed(note) for note in straight.notes]
    save_fitted(resumed, examples, out)
    delete_checkpoint(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gate", "straight"]


def test_an_unfinished_training_with_other_settings_is_not_overwritten(base, tmp_path):
    examples = planted(base, 60)
    fit_ik(examples, tokens=0, training=JudgeTrainingOptions(1, 8), work=tmp_path / "w")
    with pytest.raises(BadSetting, match="unfinished training run with other data or settings"):
        fit_ik(examples, tokens=0, training=JudgeTrainingOptions(2, 8), work=tmp_path / "w")


def test_all_weights_can_be_trained_and_the_gate_needs_its_base_no_more(tmp_path):
    base = save_word_llama(tmp_path / "base")
    examples, out = planted(base, 120), tmp_path / "gate"
    how = JudgeTrainingOptions(epochs=2, batch=8, rate=3e-3, full=True)
    fitted = fit_kbm(examples, training=how, work=tmp_path / "w")
    save_fitted(fitted, examples, out)
    base.rename(tmp_path / "gone")
    test = examples.split.test.tolist()
    raw = load_gate(str(out)).raw([examples.questions[i] for i in test], [examples.readings[i] for i in test])
    assert raw == pytest.approx(fitted.raw(test), abs=1e-6)
    assert auroc(examples.needed[test], raw) > 0.95


def test_examples_longer_than_the_limit_are_left_out_and_counted(base, tmp_path):
    with pytest.raises(BadInput, match="training examples have more than 5 tokens"):
        fit_ik(planted(base, 60), tokens=0, training=JudgeTrainingOptions(max_tokens=5), work=tmp_path / "w")


def test_a_base_without_weights_is_refused(base, tmp_path):
    with pytest.raises(BadSetting, match="'fake' has no local weights"):
        fit_ik(planted(base, 60), tokens=0, base="fake", training=QUICK, work=tmp_path / "w")


# --- looks, skipped updates, order ----------------------------------------------------------------


class Sum:
    """A model of one weight whose losses the test chooses."""

    fingerprint = "sum"
    notes = ()

    def __init__(self, losses):
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.losses, self.looks = iter(losses), []

    def prepare(self, training):
        return [self.weight]

    def set_training(self, on):
        self.is_training = on

    def compute_output(self, examples):
        margins = torch.tensor([item.targets[0] for item in examples])
        if self.is_training:
            self.looks.append([len(item.prompt.ids) for item in examples])
            return BatchOutput(self.weight.sum() * next(self.losses), margins)
        return BatchOutput(torch.tensor(next(self.losses)), margins)

    def save(self, folder):
        (folder / "weights.json").write_text("{}")


def plain(n, length=3):
    return [TrainingExample(LabelPromptTokens([1] * (length + i), [0]), (float(i % 2),)) for i in range(n)]


def run_training(tmp_path, losses, n=8, dev=0, **settings):
    how = JudgeTrainingOptions(**{"batch": 2, "epochs": 1, "rate": 1e-3, **settings})
    model = Sum(losses)
    return train_judge(model, plain(n), plain(dev), how, tmp_path / "w", lambda step: None), model


def test_an_update_whose_gradient_is_not_finite_is_skipped_and_counted(tmp_path):
    trained, model = run_training(tmp_path, [1.0, math.nan, 1.0, 1.0])
    assert trained.state.skipped == 1
    assert math.isfinite(float(model.weight.detach()))
    assert "1 updates were skipped: their gradients were not finite" in trained.describe()


class Narrow(Sum):
    """A model on a GPU with memory for a number of examples at once."""

    def __init__(self, most):
        super().__init__([1.0] * 99)
        self.most = most

    def compute_output(self, examples):
        if len(examples) > self.most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().compute_output(examples)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_what_a_gpu_has_no_room_for_is_learned_in_smaller_portions(tmp_path, most):
    model, how = Narrow(most), JudgeTrainingOptions(batch=8, epochs=1, rate=1e-3)
    train_judge(model, plain(16), [], how, tmp_path / "w", lambda step: None)
    assert max(map(len, model.looks)) <= most
    assert sum(map(len, model.looks)) == 16
    wide = Narrow(8)
    train_judge(wide, plain(16), [], how, tmp_path / "wide", lambda step: None)
    assert float(model.weight.detach()) == pytest.approx(float(wide.weight.detach()))


def test_a_gpu_without_room_for_one_example_is_said(tmp_path):
    with pytest.raises(OutOfMemory, match="to train on a single example: end other programs"):
        train_judge(Narrow(0), plain(4), [], JudgeTrainingOptions(batch=4), tmp_path / "w", lambda step: None)


def test_a_training_that_skips_most_updates_is_refused(tmp_path):
    with pytest.raises(BadSetting, match="3 of 4 updates had NaN or infinite gradients"):
        run_training(tmp_path, [1.0, math.nan, math.nan, math.nan])


def test_it_stops_when_looks_at_the_dev_split_bring_nothing_better(tmp_path):
    # four epochs of one update, with a look behind each: dev losses .5, .6, .7
    losses = [1.0, 0.5, 1.0, 0.6, 1.0, 0.7]
    trained, _ = run_training(tmp_path, losses, n=2, dev=2, epochs=4, patience=2)
    assert trained.state.dev_losses == pytest.approx((0.5, 0.6, 0.7))
    assert (trained.state.best, trained.state.n_done) == (0, 3)
    assert "stopped early: 2 dev evaluations brought no lower loss" in trained.describe()


def test_the_learning_curve_has_the_dev_auroc_of_every_look(tmp_path):
    trained, _ = run_training(tmp_path, [1.0, 1.0, 0.5, 1.0, 1.0, 0.4], n=8, dev=2, checks=2)
    looks = [line.split(", ")[1:] for line in trained.describe()[:2]]
    assert looks == [["dev loss 0.5000", "dev AUROC 1.000"], ["dev loss 0.4000", "dev AUROC 1.000"]]


def test_examples_of_like_length_come_together_within_a_window(tmp_path):
    _, model = run_training(tmp_path, [1.0] * 4, window=4)
    assert sorted(model.looks) == [[3, 4], [5, 6], [7, 8], [9, 10]]


def test_a_one_cycle_rate_begins_low_peaks_at_three_tenths_and_ends_near_nothing():
    rates = [one_cycle(update, 100) for update in range(100)]
    assert rates[0] == pytest.approx(1 / 25)
    assert rates[29] == pytest.approx(1.0)
    assert max(rates) <= 1.0
    assert rates[-1] == pytest.approx(1 / 250_000)


def test_a_share_between_no_and_yes_is_learned_as_it_is(judge):
    soft = TrainingExample(encode_kbm_answer(judge, "a b c", "True"), (0.3, 0.8))
    model = TrainableCausalModel(judge)
    with torch.no_grad():
        logits = judge.model.loaded.model(torch.tensor([soft.prompt.ids])).logits[0].double()
        margins = [
            float(logits[mark, judge.label_tokens[0]] - logits[mark, judge.label_tokens[1]])
            for mark in soft.prompt.positions
        ]
        loss = float(model.compute_output([soft]).loss)
    expected = [
        math.log1p(math.exp(-m)) * s + math.log1p(math.exp(m)) * (1 - s)
        for m, s in zip(margins, soft.targets, strict=True)
    ]
    assert loss == pytest.approx(np.mean(expected), abs=1e-4)


def test_a_mistyped_base_of_a_judge_of_answers_leads_to_the_encoders_too():
    with pytest.raises(UnknownName, match=r"unknown base 'smal'\. Did you mean 'small'\? Known: .*mpnet, small, smo"):
        make_answer_judge_spec("judge", "smal")
