import math

import numpy as np
import pytest
import torch

from knowgate.errors import BadSetting, ModelError, NotOffered
from knowgate.gates import check_offers, load_gate
from knowgate.gates.live import read_questions
from knowgate.gates.seakr import SeakrGate, standardised
from knowgate.labels.grading import StringGrader
from knowgate.labels.labeller import Labeller, Plan
from knowgate.labels.session import label_run
from knowgate.models.fake import FakeModel
from knowgate.models.hf import decoding as hf_stream
from knowgate.models.hf.model import HFModel, _uniforms
from knowgate.prompts.answer import AnswerPrompts
from knowgate.runs.readings import recorded
from knowgate.runs.run_folder import RunFolder
from knowgate.signals.dispersion import log_determinant
from knowgate.signals.features import FEATURES
from knowgate.types import Prompt, Question, Reading, Signal, Want
from tests.support.tiny_models import save_tiny_llama

ALPHA = 1e-3
PROMPTS = [Prompt("Who wrote it?"), Prompt("What is the name of the tallest tower in town?"), Prompt("Why?")]
TABLE = {"France": {"closed": "Paris", "samples": ["Paris"]}, "Peru": {"samples": [f"city {i}" for i in range(20)]}}
FRANCE, PERU = Question("Capital of France?", id="fr"), Question("Capital of Peru?", id="pe")


# --- the number -----------------------------------------------------------------------------------


def test_the_log_determinant_of_three_states_of_width_two_by_hand():
    # each state less its own mean: (1, -1), (1, -1), (0, 0); Gram [[2, 2, 0], [2, 2, 0], [0, 0, 0]]: 4, 0 and 0
    states = np.array([[1, -1], [2, 0], [5, 5]], dtype=np.float32)
    assert log_determinant(states) == pytest.approx((math.log(4 + ALPHA) + 2 * math.log(ALPHA)) / 3)


def test_states_at_right_angles_by_hand():
    states = np.array([[1, -1, 0, 0], [0, 0, 2, -2]], dtype=np.float32)  # Gram diag(2, 8)
    assert log_determinant(states, alpha=1.0) == pytest.approx((math.log(3) + math.log(9)) / 2)


def test_states_that_are_no_numbers_are_refused():
    with pytest.raises(ModelError, match="no array of numbers"):
        log_determinant(np.array([[math.nan, 1.0]], dtype=np.float32))


# --- the gate -------------------------------------------------------------------------------------


def test_need_is_one_half_at_the_paper_threshold_and_grows_with_uncertainty():
    assert SeakrGate().need(-6.0) == 0.5
    assert SeakrGate().need(-6.0 + math.log(3)) == pytest.approx(0.75)
    assert SeakrGate().need(-7.0) < 0.5 < SeakrGate().need(-5.0)


def test_standardised_takes_mean_and_deviation_of_recorded_values():
    gate = standardised(SeakrGate(), [-6.0, -2.0])
    assert (gate.center, gate.scale) == (-4.0, 2.0)
    assert gate.need(-2.0) == pytest.approx(1 / (1 + math.exp(-1)))


def test_answers_that_differ_need_more_than_one_answer_repeated():
    gate = SeakrGate().bind(FakeModel(), "")
    same, different = gate.score(
        [FRANCE, PERU], read_questions(FakeModel(TABLE), [gate], [FRANCE, PERU], AnswerPrompts())
    )
    assert same < 0.5 < different


def test_it_reads_the_middle_layer_unless_told_otherwise():
    assert SeakrGate().bind(FakeModel(layers=8), "").want.sample_layer == 4
    assert load_gate("seakr:n=5,layer=2").bind(FakeModel(), "").want == Want(samples=5, seed=0, sample_layer=2)


def test_gates_that_sample_at_different_layers_cannot_share_a_pass():
    with pytest.raises(BadSetting, match="same layer"):
        read_questions(FakeModel(), [SeakrGate(layer=1), SeakrGate(layer=2)], [FRANCE], AnswerPrompts())


def test_it_is_refused_where_there_are_no_hidden_states():
    with pytest.raises(NotOffered, match="needs hidden"):
        check_offers(SeakrGate(), FakeModel(offers=frozenset({Signal.SAMPLES})))


def test_a_recorded_number_is_not_taken_for_that_of_another_alpha():
    reading = Reading(signals={"seakr": -6.0})
    assert SeakrGate().score([FRANCE], [reading]) == [0.5]
    with pytest.raises(NotOffered, match=r"for alpha 0\.001 only"):
        SeakrGate(alpha=0.1).score([FRANCE], [reading])


@pytest.mark.parametrize("options", [{"n": 1}, {"scale": 0.0}, {"alpha": -1.0}, {"max_tokens": 0}])
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(BadSetting, match="seakr"):
        SeakrGate(**options)


# --- label runs -----------------------------------------------------------------------------------


def labelled(tmp_path, **plan):
    folder = RunFolder(tmp_path / "run")
    label_run(folder, [FRANCE, PERU], Labeller(FakeModel(TABLE), StringGrader(), Plan(**plan)), data="test")
    return folder


def test_a_label_run_keeps_the_uncertainty_and_gives_it_back(tmp_path):
    folder = labelled(tmp_path, samples=4, seakr=20)
    rows = list(folder.rows())
    gate = SeakrGate(layer=2)
    live = read_questions(FakeModel(TABLE), [gate], [FRANCE, PERU], AnswerPrompts())
    expected = [gate.uncertainty(reading) for reading in live]
    assert [row.signals["seakr"] for row in rows] == pytest.approx(expected, abs=1e-5)
    assert [len(row.closed.samples) for row in rows] == [4, 4]
    again = recorded(folder, rows)
    assert [FEATURES["seakr"](FRANCE, reading) for reading in again] == [row.signals["seakr"] for row in rows]
    assert [gate.uncertainty(reading) for reading in again] == [row.signals["seakr"] for row in rows]
    assert folder.manifest()["settings"]["seakr_layer"] == 2


def test_a_label_run_without_it_says_nothing_of_it(tmp_path):
    folder = labelled(tmp_path, samples=4)
    assert all("seakr" not in row.signals for row in folder.rows())
    assert "seakr" not in folder.manifest()["settings"]
    assert FEATURES["seakr"](FRANCE, Reading()) is None


def test_labelling_is_refused_where_there_are_no_hidden_states():
    with pytest.raises(NotOffered, match="--seakr needs hidden"):
        Labeller(FakeModel(offers=frozenset({Signal.SAMPLES})), StringGrader(), Plan(seakr=20))


# --- the states -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return HFModel(str(save_tiny_llama(tmp_path_factory.mktemp("tiny"))))


def direct(model, ids, layer):
    """The state at the last of these tokens, by one plain forward pass."""
    out = model.loaded.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return out.hidden_states[layer][0, -1].detach().numpy()


@pytest.mark.parametrize("layer", [1, 2])
def test_the_state_of_each_sample_is_that_of_its_last_token(model, layer):
    ids = [model.tokenise(model.render(prompt.text)) for prompt in PROMPTS]
    uniforms = np.random.default_rng(0).random((15, 6))
    stop = frozenset(range(1, 25))  # a third of all tokens: some samples end at once, others never
    with torch.inference_mode():
        stream = hf_stream.prefill(model.loaded.model, ids, model.pad, model.loaded.device, [layer])
        rows = hf_stream.sample(stream.copy(range(3), repeat=5), uniforms, 1.0, stop, [layer])
    lengths = {len(row.tokens) for row in rows}
    assert {0, 6} <= lengths
    assert len(lengths) > 3
    for place, row in enumerate(rows):
        expected = direct(model, ids[place // 5] + row.tokens, layer)
        np.testing.assert_allclose(row.after[layer].numpy(), expected, atol=2e-4)


def test_the_states_of_a_reading_are_those_of_its_samples(model):
    want = Want(samples=4, sample_tokens=5, seed=3, sample_layer=-1, layers=(1,), draft_tokens=2)
    reading = model.read(PROMPTS, want)[1]
    ids = model.tokenise(model.render(PROMPTS[1].text))
    with torch.inference_mode():
        stream = hf_stream.prefill(model.loaded.model, [ids], model.pad, model.loaded.device, [2])
        rows = hf_stream.sample(stream.copy([0], repeat=4), _uniforms(PROMPTS[1], want), 1.0, model.stop)
    expected = [direct(model, ids + row.tokens, 2) for row in rows]
    np.testing.assert_allclose(reading.sample_states, expected, atol=2e-4)
    assert set(reading.hidden) == {1}


def test_a_batch_gives_the_states_its_prompts_give_one_by_one(model):
    want = Want(samples=6, sample_tokens=7, seed=0, sample_layer=1)
    for prompt, together in zip(PROMPTS, model.read(PROMPTS, want), strict=True):
        alone = model.read([prompt], want)[0]
        assert [sample.text for sample in alone.samples] == [sample.text for sample in together.samples]
        np.testing.assert_allclose(together.sample_states, alone.sample_states, atol=2e-4)


def test_nothing_is_kept_that_nobody_asked_for(model):
    assert model.read(PROMPTS[:1], Want(samples=2, seed=0))[0].sample_states is None
    assert model.read(PROMPTS[:1], Want(draft_tokens=1, sample_layer=1))[0].sample_states is None
