import math

import numpy as np
import pytest
import torch

from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.storage import load_readings
from knowgate.data.signals.features import FEATURES
from knowgate.data.signals.samples import log_determinant, log_mean_square, relative_dispersion
from knowgate.errors import BadSetting, ModelError, UnsupportedSignal
from knowgate.gates import load_gate
from knowgate.gates.scoring import check_model_signals, read_questions
from knowgate.gates.seakr import SeakrGate
from knowgate.labels.grading import StringGrader
from knowgate.labels.labeler import Labeler
from knowgate.labels.options import LabelOptions
from knowgate.labels.run import run_labeling
from knowgate.models.backend import draw_uniforms
from knowgate.models.fake import FakeModel
from knowgate.models.hf import decoding as hf_stream
from knowgate.models.hf.model import HFModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Prompt, Question, Reading, Sampling, Signal, SignalRequest
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


def test_orthogonal_states_equal_the_value_worked_out_by_hand():
    states = np.array([[1, -1, 0, 0], [0, 0, 2, -2]], dtype=np.float32)  # Gram diag(2, 8)
    assert log_determinant(states, alpha=1.0) == pytest.approx((math.log(3) + math.log(9)) / 2)


def test_states_that_are_no_numbers_are_rejected():
    with pytest.raises(ModelError, match="must be a matrix"):
        log_determinant(np.array([[math.nan, 1.0]], dtype=np.float32))


# --- the gate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_need_runs_from_equal_to_orthogonal_states_of_any_length(scale):
    def need(*states):
        block = scale * np.array(states, dtype=np.float32)
        return SeakrGate(n=2, layer=1).score([FRANCE], [Reading(sample_states=block)])[0]

    assert need([1, -1, 0, 0], [1, -1, 0, 0]) == pytest.approx(0.0, abs=1e-6)
    assert need([1, -1, 0, 0], [0, 0, 1, -1]) == pytest.approx(1.0, abs=1e-6)
    assert 0.5 < need([1, -1, 0, 0], [1, -1, 1, -1]) < 1


def test_the_relative_scale_equals_the_value_worked_out_by_hand():
    # 2 states of squared length 4, alpha 1: least (log 9 + log 1) / 2, most log 5
    assert relative_dispersion(math.log(5), math.log(4), 2, alpha=1.0) == pytest.approx(1.0)
    assert relative_dispersion(math.log(3), math.log(4), 2, alpha=1.0) == pytest.approx(0.0)
    assert relative_dispersion(1.3, math.log(4), 2, alpha=1.0) == pytest.approx((1.3 - math.log(3)) / math.log(5 / 3))
    assert log_mean_square(np.array([[1, -1], [2, 0], [5, 5]], dtype=np.float32)) == pytest.approx(math.log(4 / 3))


def test_with_a_center_need_is_one_half_there_and_grows_with_uncertainty():
    paper = SeakrGate(center=-6.0)
    assert paper.compute_need(-6.0, size=3.0) == 0.5
    assert paper.compute_need(-6.0 + math.log(3)) == pytest.approx(0.75)
    assert paper.compute_need(-7.0) < 0.5 < paper.compute_need(-5.0)


def test_values_of_older_runs_are_scored_with_the_old_center():
    older = [Reading(signals={"seakr": value}) for value in (-6.0, -6.0 + math.log(3))]
    assert SeakrGate().score([FRANCE, PERU], older) == pytest.approx([0.5, 0.75])


def test_differing_answers_have_a_higher_need_than_repeated_ones():
    gate = SeakrGate().bind(FakeModel(), "")
    same, different = gate.score(
        [FRANCE, PERU], read_questions(FakeModel(TABLE), [gate], [FRANCE, PERU], AnswerPrompts())
    )
    assert same < 0.5 < different


def test_it_reads_the_middle_layer_unless_told_otherwise():
    assert SeakrGate().bind(FakeModel(layers=8), "").request.sample_layer == 4
    assert load_gate("seakr:n=5,layer=2").bind(FakeModel(), "").request == SignalRequest(
        samples=5, seed=0, sample_layer=2, sample_end=True
    )


def test_gates_that_sample_at_different_layers_cannot_share_a_pass():
    with pytest.raises(BadSetting, match="same layer"):
        read_questions(FakeModel(), [SeakrGate(layer=1), SeakrGate(layer=2)], [FRANCE], AnswerPrompts())


def test_it_is_rejected_where_there_are_no_hidden_states():
    with pytest.raises(UnsupportedSignal, match="needs hidden"):
        check_model_signals(SeakrGate(), FakeModel(offers=frozenset({Signal.SAMPLES})))


def test_a_recorded_number_needs_no_states():
    reading = Reading(signals={"seakr_end": -6.0, "seakr_size": 7.0})
    assert SeakrGate(center=-6.0).score([FRANCE], [reading]) == [0.5]
    with pytest.raises(UnsupportedSignal, match="Bind the gate to its model first"):
        SeakrGate().score([FRANCE], [Reading()])


@pytest.mark.parametrize("options", [{"n": 1}, {"center": float("nan")}, {"max_tokens": 0}])
def test_settings_out_of_range_are_rejected(options):
    with pytest.raises(BadSetting, match="seakr"):
        SeakrGate(**options)


# --- label runs -----------------------------------------------------------------------------------


def labelled(tmp_path, **plan):
    folder = RunFolder(tmp_path / "run")
    run_labeling(folder, [FRANCE, PERU], Labeler(FakeModel(TABLE), StringGrader(), LabelOptions(**plan)), data="test")
    return folder


def test_a_label_run_records_the_uncertainty(tmp_path):
    folder = labelled(tmp_path, samples=4, seakr=True)
    rows = list(folder.rows())
    gate = SeakrGate(layer=2)
    live = read_questions(FakeModel(TABLE), [gate], [FRANCE, PERU], AnswerPrompts())
    expected = [gate.compute_uncertainty(reading) for reading in live]
    assert [row.signals["seakr_end"] for row in rows] == pytest.approx(expected, abs=1e-5)
    assert [len(row.closed.samples) for row in rows] == [4, 4]
    again = load_readings(folder, rows)
    assert [FEATURES["seakr_end"](FRANCE, reading) for reading in again] == [row.signals["seakr_end"] for row in rows]
    assert [FEATURES["seakr"](FRANCE, reading) for reading in again] == [None, None]
    assert [gate.compute_uncertainty(reading) for reading in again] == [row.signals["seakr_end"] for row in rows]
    assert gate.score([FRANCE, PERU], again) == pytest.approx(gate.score([FRANCE, PERU], live), abs=1e-5)
    settings = folder.manifest()["settings"]
    assert (settings["seakr_layer"], settings["seakr_at"]) == (2, "end token")


def test_a_label_run_without_uncertainty_has_no_entry_for_it(tmp_path):
    folder = labelled(tmp_path, samples=4)
    assert all("seakr_end" not in row.signals for row in folder.rows())
    assert not {"seakr", "seakr_at"} & set(folder.manifest()["settings"])
    assert FEATURES["seakr_end"](FRANCE, Reading()) is None


def test_labeling_needs_hidden_states():
    with pytest.raises(UnsupportedSignal, match=r"lacks signals that seakr=True needs: hidden"):
        Labeler(FakeModel(offers=frozenset({Signal.SAMPLES})), StringGrader(), LabelOptions(seakr=True))


# --- the states -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return HFModel(str(save_tiny_llama(tmp_path_factory.mktemp("tiny"))))


def direct(model, ids, layer):
    """The state at the last of these tokens, by one plain forward pass."""
    out = model.loaded.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return out.hidden_states[layer][0, -1].detach().numpy()


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("read_end_token", [False, True])
def test_the_state_of_each_sample_is_that_of_its_last_token_or_of_the_one_that_ends_it(model, layer, read_end_token):
    ids = [model.tokenize(model.render(prompt.text)) for prompt in PROMPTS]
    uniforms = np.random.default_rng(0).random((15, 6))
    stop = frozenset(range(1, 25))  # a third of all tokens: some samples end at once, others never
    with torch.inference_mode():
        stream = hf_stream.prefill(model, ids, [layer])
        rows = hf_stream.sample_rows(
            stream.copy(range(3), repeat=5), uniforms, Sampling(), stop, [layer], read_end_token=read_end_token
        )
        ends = _ends(model, stream, uniforms, rows) if read_end_token else [[]] * len(rows)
    lengths = {len(row.tokens) for row in rows}
    assert {0, 6} <= lengths
    assert len(lengths) > 3
    for place, row in enumerate(rows):
        expected = direct(model, ids[place // 5] + row.tokens + ends[place], layer)
        np.testing.assert_allclose(row.states[layer].numpy(), expected, atol=2e-4)


def _ends(model, stream, uniforms, rows):
    """The token that ended each sample, drawn once more by one plain pass over all before it; none where it was cut."""
    again = hf_stream.sample_rows(
        stream.copy(range(3), repeat=5), uniforms, Sampling(), frozenset()
    )  # nothing ends these
    return [[drawn.tokens[len(row.tokens)]] if row.finished else [] for row, drawn in zip(rows, again, strict=True)]


def test_samples_that_end_together_have_the_state_of_their_end(model):
    ids = [model.tokenize(model.render(PROMPTS[0].text))]
    every = frozenset(range(len(model.loaded.tokenizer)))
    with torch.inference_mode():
        stream = hf_stream.prefill(model, ids, [1])
        uniforms = np.full((2, 4), 0.5)
        drawn = hf_stream.sample_rows(stream.copy([0], repeat=2), uniforms, Sampling(), frozenset())[0].tokens[0]
        rows = hf_stream.sample_rows(stream.copy([0], repeat=2), uniforms, Sampling(), every, [1], read_end_token=True)
    for row in rows:
        assert (row.finished, row.tokens) == (True, [])
        np.testing.assert_allclose(row.states[1].numpy(), direct(model, [*ids[0], drawn], 1), atol=2e-4)


def test_the_states_of_a_reading_are_those_of_its_samples(model):
    want = SignalRequest(samples=4, sample_tokens=5, seed=3, sample_layer=-1, layers=(1,), draft_tokens=2)
    reading = model.read(PROMPTS, want)[1]
    ids = model.tokenize(model.render(PROMPTS[1].text))
    with torch.inference_mode():
        stream = hf_stream.prefill(model, [ids], [2])
        rows = hf_stream.sample_rows(
            stream.copy([0], repeat=4), draw_uniforms(PROMPTS[1], want), Sampling(), model.stop_ids
        )
    expected = [direct(model, ids + row.tokens, 2) for row in rows]
    np.testing.assert_allclose(reading.sample_states, expected, atol=2e-4)
    assert set(reading.hidden) == {1}


def test_a_batch_gives_the_same_states_as_single_prompts(model):
    want = SignalRequest(samples=6, sample_tokens=7, seed=0, sample_layer=1)
    for prompt, together in zip(PROMPTS, model.read(PROMPTS, want), strict=True):
        alone = model.read([prompt], want)[0]
        assert [sample.text for sample in alone.samples] == [sample.text for sample in together.samples]
        np.testing.assert_allclose(together.sample_states, alone.sample_states, atol=2e-4)


def test_nothing_is_stored_without_a_request(model):
    assert model.read(PROMPTS[:1], SignalRequest(samples=2, seed=0))[0].sample_states is None
    assert model.read(PROMPTS[:1], SignalRequest(draft_tokens=1, sample_layer=1))[0].sample_states is None
