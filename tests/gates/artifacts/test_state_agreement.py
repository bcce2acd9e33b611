"""A gate fitted on weights in this process works on a server that gives the same states, and on no other."""

import shutil
import sys
from dataclasses import replace

import httpx
import numpy as np
import pytest

from knowgate.core.http_client import RetryPolicy
from knowgate.errors import ArtifactError, UnsupportedSignal
from knowgate.gates import load_gate
from knowgate.gates.artifacts.drift import (
    REFERENCE_COUNT,
    ReferenceStates,
    measure_state_agreement,
    read_reference_states,
)
from knowgate.gates.artifacts.gate_folder import REFERENCE_FILE, read_artifact
from knowgate.gates.scoring import bind_gate, read_questions, score_with_raw
from knowgate.models.openai.model import OpenAIModel
from knowgate.models.openai.spec import HiddenStateConfig
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.training.examples import load_examples
from knowgate.training.fusion import fit_fusion
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.probe import fit_probe
from knowgate.types import Prompt, Question, Reading, SignalRequest
from tests.support.fitted_gates import FACTS, MODEL, label_facts

if sys.platform == "win32":
    pytest.skip("files are locked otherwise there", allow_module_level=True)

from tests.support.states_servers import SERVED_LAYERS, SglangStates, VllmStates, text_ids

PROMPTS = AnswerPrompts()
QUICK = RetryPolicy(timeout=120, total=360, retries=1, backoff=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Gates fitted on the fake model's states: a probe of layer 2, and a fusion."""
    out = tmp_path_factory.mktemp("fitted")
    examples = load_examples([label_facts(out / "run")], target="known")
    save_fitted(fit_probe(examples, kind="linear", layer="2"), examples, out / "probe")
    save_fitted(fit_fusion(examples, cheap=True), examples, out / "fusion")
    save_fitted(fit_fusion(examples), examples, out / "costly")
    return out


def same_states(ids, layer):
    """What the fake model has for the prompt these tokens spell."""
    return MODEL.read([Prompt(bytes(ids).decode())], SignalRequest(layers=(layer,)))[0].hidden[layer]


def connect(server, folder, layers=SERVED_LAYERS):
    states = HiddenStateConfig(layers, 5, folder)
    return OpenAIModel(
        "m", "http://server.test/v1", retry=QUICK, transport=httpx.MockTransport(server), hidden_states=states
    )


@pytest.fixture(params=["vllm", "sglang"])
def server(request, tmp_path):
    one = VllmStates(tmp_path, late=0.0) if request.param == "vllm" else SglangStates()
    one.state = same_states
    return one


def needs(gate, model, questions):
    bound = bind_gate(gate, model, PROMPTS)
    return score_with_raw(bound, questions, read_questions(model, [bound], questions, PROMPTS)).needs


def test_a_probe_gives_the_same_needs_on_a_server_with_the_same_states(folder, server, tmp_path):
    gate, asked = load_gate(str(folder / "probe")), [replace(FACTS[7], id="new"), Question("who?"), FACTS[3]]
    model = connect(server, tmp_path)
    np.testing.assert_allclose(needs(gate, model, asked), needs(gate, MODEL, asked), atol=1e-3)
    note = bind_gate(gate, model, PROMPTS).note
    assert note.startswith("fitted on fake, whose states the server returns (smallest cosine 1.0")


def test_ten_questions_are_compared(folder, server, tmp_path):
    bind_gate(load_gate(str(folder / "probe")), connect(server, tmp_path), PROMPTS)
    kept = read_reference_states(read_artifact(folder / "probe"))
    assert [question.text for question in kept.questions] == [
        FACTS[place].text for place in (0, 9, 19, 29, 39, 49, 59, 69, 79, 89)
    ]
    assert sorted(server.ids) == sorted(text_ids(PROMPTS.closed(question).text) for question in kept.questions)
    assert len(server.ids) == REFERENCE_COUNT


def test_layers_in_another_order_are_rejected_with_the_cosine(folder, server, tmp_path):
    model = connect(server, tmp_path, layers=(2, 4))
    with pytest.raises(ArtifactError, match=r"On 10 prompts the smallest cosine is -?0\.\d{4} \(required: 0\.99\)"):
        bind_gate(load_gate(str(folder / "probe")), model, PROMPTS)


def test_similar_states_must_be_closest_to_their_own():
    """With much in common every cosine is above .99, whatever was asked."""
    common = np.full(16, 1000.0, np.float32)
    states = np.stack([same_states(text_ids(f"q{number}"), 2) for number in range(10)]) + common
    mixed = [Reading(hidden={2: states[(place + 1) % 10]}) for place in range(10)]
    found = measure_state_agreement(ReferenceStates([], {2: states}), mixed, (2,))
    assert found.cosine > 0.99
    assert (found.nearest, found.n, found.is_sufficient) == (0, 10, False)
    right = [Reading(hidden={2: state + 0.1}) for state in states]
    assert measure_state_agreement(ReferenceStates([], {2: states}), right, (2,)).is_sufficient


def test_states_of_another_width_do_not_agree():
    states = np.ones((3, 8), np.float32)
    found = measure_state_agreement(
        ReferenceStates([], {2: states}), [Reading(hidden={2: np.ones(9, np.float32)})] * 3, (2,)
    )
    assert (found.cosine, found.is_sufficient) == (0.0, False)


def test_another_wording_is_rejected_before_anything_is_compared(folder, server, tmp_path):
    made = load_gate(str(folder / "probe"))
    with pytest.raises(ArtifactError, match="Your LLM is"):
        bind_gate(made, connect(server, tmp_path), AnswerPrompts(lang="zh"))
    assert server.ids == []


def test_a_gate_without_reference_states_is_rejected(folder, server, tmp_path):
    made = load_gate(str(folder / "probe"))
    bare = replace(made, artifact=replace(made.artifact, path=tmp_path))
    with pytest.raises(ArtifactError, match=r"cannot compare the hidden states of openai:m with .* Fit gate"):
        bind_gate(bare, connect(server, tmp_path), PROMPTS)


def test_a_gate_that_reads_unavailable_layers_is_rejected_when_bound(folder, server, tmp_path):
    with pytest.raises(UnsupportedSignal, match="returns too few log-probabilities per token to compute entropies"):
        bind_gate(load_gate(str(folder / "fusion")), connect(server, tmp_path), PROMPTS)
    with pytest.raises(UnsupportedSignal, match="does not return hidden states of sampled answers"):
        bind_gate(load_gate(str(folder / "costly")), connect(server, tmp_path), PROMPTS)
    with pytest.raises(
        UnsupportedSignal,
        match="'seakr' does not work with openai:m: this server does not return hidden states of sampled",
    ):
        bind_gate(load_gate("seakr"), connect(server, tmp_path), PROMPTS)
    assert server.ids == []


def test_changed_reference_states_are_rejected(folder, tmp_path):
    copy = shutil.copytree(folder / "probe", tmp_path / "copy")
    (copy / REFERENCE_FILE).write_bytes(b"x")
    with pytest.raises(ArtifactError, match=rf"'{REFERENCE_FILE}' was changed"):
        load_gate(str(copy))
