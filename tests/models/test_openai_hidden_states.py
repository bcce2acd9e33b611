"""Hidden states from files of a vLLM server and from responses of an SGLang server."""

import sys

import httpx
import numpy as np
import pytest

from knowgate.core.http_client import RetryPolicy
from knowgate.errors import BadSetting, ModelError, UnsupportedSignal
from knowgate.labels.options import resolve_layers
from knowgate.models.openai.hidden_states import consume_states_file, locate_states_file
from knowgate.models.openai.model import OpenAIModel
from knowgate.models.openai.spec import HiddenStateConfig
from knowgate.types import LabelPrompt, Prompt, Signal, SignalRequest
from tests.support.vllm_recording import STATE_PROMPTS, load_recorded_states

if sys.platform == "win32":
    pytest.skip("files are locked otherwise there", allow_module_level=True)

from tests.support.states_servers import (
    DRAFT_IDS,
    SERVED_LAYERS,
    SglangStates,
    StatesServer,
    VllmStates,
    state_of,
    text_ids,
)

URL = "http://server.test/v1"
QUICK = RetryPolicy(timeout=120, total=360, retries=1, backoff=0.0)
PROMPTS = [Prompt(f"question {number}?") for number in range(4)]
BOTH = SignalRequest(draft_tokens=2, layers=(2, 4), after_draft=True)


def connect(server, folder=None, layers=SERVED_LAYERS, depth=5):
    states = HiddenStateConfig(layers, depth, folder)
    return OpenAIModel("m", URL, retry=QUICK, transport=httpx.MockTransport(server), hidden_states=states)


@pytest.fixture(params=["vllm", "sglang"])
def served(request, tmp_path):
    """A model on each kind of server, and the server itself."""
    server = VllmStates(tmp_path) if request.param == "vllm" else SglangStates()
    return connect(server, tmp_path if request.param == "vllm" else None), server


def test_hidden_states_are_offered_if_the_spec_lists_layers(served):
    model, _ = served
    assert Signal.HIDDEN in model.offers
    assert model.depth == 5


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_states_belong_to_the_last_tokens_of_prompt_and_draft(served, finish):
    """The token that ended a draft is not part of it, and layers are found by number, not by the server's order."""
    model, server = served
    server.finish = finish
    for prompt, reading in zip(PROMPTS, model.read(PROMPTS, BOTH), strict=True):
        for layer in (2, 4):
            before, after = (
                state_of(text_ids(prompt.text), layer),
                state_of([*text_ids(prompt.text), *DRAFT_IDS], layer),
            )
            np.testing.assert_array_equal(reading.hidden[layer], before)
            np.testing.assert_array_equal(reading.hidden_after[layer], after)


def test_states_without_a_draft_need_one_request(served):
    model, server = served
    reading = model.read(PROMPTS[:1], SignalRequest(layers=(-1,)))[0]
    np.testing.assert_array_equal(reading.hidden[-1], state_of(text_ids(PROMPTS[0].text), 4))
    assert (server.ids, reading.hidden_after) == ([text_ids(PROMPTS[0].text)], {})


def test_raw_prompts_have_states_too(served):
    model, _ = served
    reading = model.read([Prompt("as it stands", raw=True)], SignalRequest(layers=(2,)))[0]
    np.testing.assert_array_equal(reading.hidden[2], state_of(text_ids("as it stands"), 2))


def test_no_file_is_left_behind(tmp_path):
    """vLLM writes a file for every request, also for those whose states are not read."""
    server = VllmStates(tmp_path)
    model = connect(server, tmp_path)
    model.read(PROMPTS, BOTH)
    model.generate(PROMPTS, max_tokens=3, temperature=1.0, n=2)
    list(model.stream(PROMPTS[0], max_tokens=3))
    model.label_logits([LabelPrompt(("Is it?",), raw=False)], ["Paris", "Lyon"])
    server.wait()
    assert len(server.writers) > 15
    assert list(tmp_path.iterdir()) == []


def test_states_in_bfloat16_are_read(tmp_path):
    server = VllmStates(tmp_path)
    server.bf16 = True
    found = connect(server, tmp_path).read(PROMPTS[:1], SignalRequest(layers=(2,)))[0].hidden[2]
    np.testing.assert_allclose(found, state_of(text_ids(PROMPTS[0].text), 2), rtol=2**-7)


def test_labels_are_not_requested_by_token_id_from_a_vllm_that_extracts_states(tmp_path):
    """vLLM 0.32 crashes on such a request."""
    server = VllmStates(tmp_path)
    connect(server, tmp_path).label_logits([LabelPrompt(("Is it?",), raw=False)], ["yes", "no"])
    assert not any("logprob_token_ids" in body for _, body in server.bodies)


# --- refused --------------------------------------------------------------------------------------


def test_a_layer_that_the_server_does_not_give_is_refused(served):
    model, server = served
    with pytest.raises(
        UnsupportedSignal,
        match=r"returns hidden states of the layers 4, 2, but not of layer 3\. Start the server with that layer",
    ):
        model.read(PROMPTS, SignalRequest(layers=(2, 3)))
    assert server.ids == []


def test_a_wrong_number_of_layers_is_an_error(tmp_path):
    for server, words in (
        (VllmStates(tmp_path), "of 2 layers, but #layers= lists 3"),
        (SglangStates(), "cannot be divided among 3 layers"),
    ):
        with pytest.raises(BadSetting, match=words):
            connect(server, tmp_path, layers=(4, 2, 1)).read(PROMPTS[:1], SignalRequest(layers=(2,)))


def test_a_label_run_checks_the_layers_before_it_starts(served):
    model, server = served
    assert resolve_layers("mid,last", model) == (2, 4)
    with pytest.raises(UnsupportedSignal, match="but not of layer 3"):
        resolve_layers("mid,late", model)
    assert server.ids == []


def test_states_of_samples_are_refused(served):
    with pytest.raises(UnsupportedSignal, match="does not return hidden states of sampled answers"):
        served[0].read(PROMPTS, SignalRequest(samples=2, sample_layer=2))


def test_vllm_needs_a_storage_folder():
    with pytest.raises(BadSetting, match=r"&storage=DIR.*vLLM's shared_storage_path"):
        connect(VllmStates(None)).read(PROMPTS, SignalRequest(layers=(2,)))


class Plain(StatesServer):
    maker = "vllm"

    def states_reply(self, ids, body):
        return httpx.Response(200, json={"choices": [{"text": "x"}], "meta_info": {}})


class Ollama(StatesServer):
    maker = "library"


def test_servers_that_give_no_hidden_states_are_refused(tmp_path):
    with pytest.raises(
        UnsupportedSignal, match=r"openai:m returned no hidden states\. Start the server as docs/runtimes\.md"
    ):
        connect(Plain(), tmp_path).read(PROMPTS[:1], SignalRequest(layers=(2,)))
    with pytest.raises(UnsupportedSignal, match=r"is 'library', which cannot return hidden states. Use vLLM or SGLang"):
        connect(Ollama(), tmp_path).read(PROMPTS[:1], SignalRequest(layers=(2,)))


def test_a_wrong_storage_folder_is_explained(tmp_path):
    with pytest.raises(ModelError, match=r"'cmpl-1\.safetensors' of hidden states is missing .*shared_storage_path"):
        consume_states_file(tmp_path, "/theirs/cmpl-1.safetensors", [], timeout=0.02)


def test_a_server_cannot_name_a_file_outside_the_folder(tmp_path):
    assert locate_states_file(tmp_path, "/etc/../x-1.safetensors") == tmp_path / "x-1.safetensors"
    for name in ("/etc/passwd", "..", "", "a b.safetensors", "C:\\temp\\secret"):
        with pytest.raises(ModelError, match="invalid file name"):
            locate_states_file(tmp_path, name)


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}", (1 << 40).to_bytes(8, "little")])
def test_a_damaged_file_is_refused_and_deleted(tmp_path, data):
    (tmp_path / "a-1.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match="damaged or has an unknown format"):
        consume_states_file(tmp_path, "a-1.safetensors", [], timeout=0.02)
    assert list(tmp_path.iterdir()) == []


def test_states_of_other_tokens_are_refused(tmp_path):
    server = VllmStates(tmp_path)
    write = server.write
    server.write = lambda kind, ids: write(kind, [*ids, 5])
    with pytest.raises(ModelError, match="of another prompt"):
        connect(server, tmp_path).read(PROMPTS[:1], SignalRequest(layers=(2,)))


# --- real numbers ---------------------------------------------------------------------------------


@pytest.mark.model
def test_states_of_a_recorded_vllm_equal_those_of_transformers(smollm):
    recorded = load_recorded_states()
    readings = smollm.read(STATE_PROMPTS, SignalRequest(layers=tuple(recorded)))
    for layer, theirs in recorded.items():
        mine = np.stack([reading.hidden[layer] for reading in readings])
        cosines = (mine * theirs).sum(1) / np.linalg.norm(mine, axis=1) / np.linalg.norm(theirs, axis=1)
        assert cosines.min() > 0.999
        assert np.abs(mine - theirs).max() < 0.01 * np.abs(mine).max()
