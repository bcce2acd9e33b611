"""A judge that is a small encoder: it learns, comes back from its folder, and reads what it is to read."""

import shutil

import numpy as np
import pytest

from knowgate.errors import ArtifactError, BadSetting, WeightsError
from knowgate.gates import load_gate
from knowgate.gates.answer_judge import JudgeGate
from knowgate.gates.artifacts.gate_folder import Artifact, read_artifact
from knowgate.gates.judges.encoder_judge import EncoderJudge, PairEncoder, resolve_encoder
from knowgate.gates.scoring import score_questions
from knowgate.stats.metrics import auroc
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges.answer_judge import fit_answer_judge
from knowgate.training.judges.trainable_models import TrainableEncoder
from knowgate.training.judges.training_options import JudgeTrainingOptions
from tests.support.judge_data import LETTERS, planted, quick, score_reloaded
from tests.support.tiny_models import save_tiny_cross_encoder

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "x", *LETTERS, "?", "no", "idea"]
HOW = {"epochs": 8, "batch": 8, "learning_rate": 1e-2}


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with quick():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_cross_encoder(tmp_path_factory.mktemp("encoder"), WORDS)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    return planted(tmp_path_factory.mktemp("nothing"), 240, by="draft")


def make(folder, examples, base, **options):
    fitted = fit_answer_judge(examples, base=f"encoder:{base}", work=folder / "work", **{**HOW, **options})
    save_fitted(fitted, examples, folder / "gate")
    return folder / "gate"


@pytest.fixture(scope="module")
def single(tmp_path_factory, examples, base):
    return make(tmp_path_factory.mktemp("single"), examples, base)


@pytest.fixture(scope="module")
def brief(tmp_path_factory, examples):
    """A judge trained for one epoch, whose base is no longer there."""
    folder = tmp_path_factory.mktemp("brief")
    base = save_tiny_cross_encoder(folder / "base", WORDS)
    gate = make(folder, examples, base, epochs=1)
    base.rename(folder / "gone")
    return gate


def taken(examples, places):
    return [examples.questions[i] for i in places], [examples.readings[i] for i in places]


def test_it_learns_a_rule_planted_in_the_answer(single, examples):
    test = examples.split.test.tolist()
    needs = score_questions(load_gate(str(single)), *taken(examples, test))
    assert auroc(examples.needed[test], np.array(needs)) > 0.95


def test_a_reloaded_gate_gives_the_same_scores(single, examples):
    test = examples.split.test.tolist()
    assert score_reloaded(single, examples, test) == score_questions(load_gate(str(single)), *taken(examples, test))


def test_the_gate_does_not_need_its_base_model(brief, examples):
    assert 0 <= load_gate(str(brief)).score(*taken(examples, [0]))[0] <= 1


def test_its_weights_are_safetensors_and_nothing_that_runs_code(single):
    kept = {path.suffix for path in (single / "adapter").iterdir()}
    assert ".safetensors" in kept
    assert kept <= {".safetensors", ".json", ".txt"}


def test_several_seeds_are_averaged(examples, base, tmp_path):
    gate = JudgeGate.load(str(make(tmp_path, examples, base, epochs=1, seeds=2)))
    cut = gate.judge.encode_answer("a b c?", "x a", "")
    votes = [gate.judge.predict_member(number, [cut]) for number in range(2)]
    assert votes[0] != votes[1]
    assert gate.judge.predict_known([cut])[0] == pytest.approx((votes[0][0] + votes[1][0]) / 2)


def test_weights_that_were_changed_are_not_loaded(brief, examples, tmp_path):
    out = shutil.copytree(brief, tmp_path / "gate")
    artifact = read_artifact(out)
    with (out / "adapter" / "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(ArtifactError, match="was changed or damaged"):
        JudgeGate(artifact).score(*taken(examples, [0]))


def test_it_truncates_the_answer_without_changing_its_text(base):
    encoder = PairEncoder(base)
    encoder.load_weights()
    assert EncoderJudge((encoder,)).truncate(" A b  C d", 3) == "A b  C"


def test_a_missing_encoder_is_reported():
    with pytest.raises(WeightsError, match="the encoder folder 'nowhere' does not exist"):
        resolve_encoder("encoder:nowhere")


# --- a teacher ------------------------------------------------------------------------------------


def test_a_distilled_judge_names_its_teacher(single, examples, base, tmp_path):
    out = make(tmp_path, examples, base, epochs=1, teacher=str(single))
    notes = load_gate(str(out)).artifact.manifest["notes"]
    seen = len(examples.split.train)
    assert notes[0] == (
        "distilled from the gate 'gate': its probability and the grade count half each; the teacher was itself "
        f"trained on {seen} of these {seen} rows and adds less to their labels"
    )


def test_a_teacher_of_benefit_is_rejected(single, examples, base, tmp_path, monkeypatch):
    other = JudgeGate(Artifact(single, {**read_artifact(single).manifest, "target": "benefit"}))
    monkeypatch.setattr("knowgate.training.judges.answer_judge.load_fitted_gate", lambda folder: other)
    with pytest.raises(BadSetting, match="does not predict from texts alone whether answers are right"):
        make(tmp_path, examples, base, teacher=str(single))


def test_frozen_layers_and_the_embeddings_below_them_are_not_trained(base):
    encoder = PairEncoder(resolve_encoder(f"encoder:{base}"), 0)
    encoder.load_weights()
    parameters = TrainableEncoder(encoder).prepare(JudgeTrainingOptions(full=True, frozen_layers=1))
    trained = {id(parameter) for parameter in parameters}
    names = [name for name, parameter in encoder.model.named_parameters() if id(parameter) in trained]
    assert any(name.startswith("classifier") for name in names)
    assert not any(".embeddings." in name or ".layer.0." in name for name in names)
    frozen = [name for name, parameter in encoder.model.named_parameters() if id(parameter) not in trained]
    assert any(".embeddings." in name for name in frozen)
