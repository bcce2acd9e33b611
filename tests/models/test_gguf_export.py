"""Models written as GGUF give the same results in transformers and in llama.cpp."""

import gguf
import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM

from knowgate.errors import BadSetting
from knowgate.models import load_model
from knowgate.models.gguf import check_exportable, write_gguf, write_tokenizer
from knowgate.models.llamacpp.classifier import LlamaCppClassifier
from tests.support.tiny_models import save_spoken_llama, save_word_llama

TEXTS = ["Question: Who?", "Yes or No: is the proposed answer correct? 12, 345!", "谁写的?"]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def tiny(request, tmp_path_factory):
    """A tiny model and a folder to write it to."""
    folder = tmp_path_factory.mktemp(request.param)
    model = load_model(f"hf:{save_spoken_llama(folder / 'model', kind=request.param)}")
    for name, value in model.loaded.model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value)
        else:
            value.data = value.data.half().float()  # f16 keeps them as they are, so that nothing else may differ
    return model, folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KNOWGATE_CACHE", str(tmp_path / "cache"))


def write(tiny, kind):
    model, folder = tiny
    file = folder / f"{kind}.gguf"
    write_gguf(file, model.loaded.model, model.loaded.tokenizer, number_format=kind, tokenizer_source=None)
    return file


def margins(network, model, pair):
    with torch.inference_mode():
        logits = [network(torch.tensor([model.tokenize(text)])).logits[0, -1] for text in TEXTS]
    return [float(one[pair[0]] - one[pair[1]]) for one in logits]


def labels(model):
    return [model.tokenize("Yes")[0], model.tokenize("No")[0]]


@pytest.mark.parametrize(("kind", "tolerance"), [("f16", 1e-4), ("q8_0", 0.3)])
def test_transformers_reads_the_written_file(tiny, kind, tolerance):
    model, folder = tiny
    file = write(tiny, kind)
    again = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    before = margins(model.loaded.model, model, labels(model))
    assert max(np.abs(before)) > 1
    assert margins(again, model, labels(model)) == pytest.approx(before, abs=tolerance)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="older versions of transformers read no GGUF file of a Llama without a token for the beginning of a text",
)
def test_the_gguf_backend_reads_the_written_tokenizer(tmp_path):
    model = load_model(f"hf:{save_spoken_llama(tmp_path / 'model')}")
    again = load_model(f"gguf:{write((model, tmp_path), 'q8_0')}")
    assert [again.tokenize(text) for text in TEXTS] == [model.tokenize(text) for text in TEXTS]
    assert again.render("Who?") == model.render("Who?")


@pytest.mark.parametrize(("kind", "tolerance"), [("f16", 0.005), ("q8_0", 0.1)])
def test_llama_cpp_gives_two_tokens_the_same_probabilities(tiny, kind, tolerance):
    pytest.importorskip("xllamacpp")
    model, folder = tiny
    model.loaded.tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    other = LlamaCppClassifier(write(tiny, kind), folder / "tokenizer.json")
    pair = labels(model)
    there = [other.score_token_pair(other.tokenize(text), pair) for text in TEXTS]
    assert there == pytest.approx(
        [1 / (1 + np.exp(-margin)) for margin in margins(model.loaded.model, model, pair)], abs=tolerance
    )


def test_query_rows_are_permuted_for_llama_but_not_for_qwen(tiny):
    model, _ = tiny
    reader = gguf.GGUFReader(write(tiny, "f16"))
    theirs = next(one.data for one in reader.tensors if one.name == "blk.0.attn_q.weight").astype(np.float32)
    ours = model.loaded.model.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
    turned = ours.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)  # 4 heads of 16
    wanted = turned if model.loaded.model.config.model_type == "llama" else ours
    assert theirs == pytest.approx(wanted, abs=0)


def test_a_tokenizer_unknown_to_llama_cpp_is_refused(tmp_path):
    model = load_model(f"hf:{save_word_llama(tmp_path)}")
    with pytest.raises(BadSetting, match=r"cannot be exported to GGUF.*WordLevel with Whitespace.*base="):
        write_tokenizer(None, model.loaded.tokenizer, 100)


def test_an_unknown_architecture_is_refused(tiny):
    config = type(tiny[0].loaded.model.config)()
    config.model_type = "gemma9"
    with pytest.raises(BadSetting, match=r"'gemma9' cannot be exported to GGUF. Supported architectures: llama, qwen2"):
        check_exportable(config)


def test_scaled_position_embeddings_are_refused(tiny):
    config = type(tiny[0].loaded.model.config)()
    config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    with pytest.raises(BadSetting, match=r"position embeddings \('yarn'\)"):
        check_exportable(config)
