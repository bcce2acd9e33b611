"""Quantized weights: options that cannot work are refused, which needs no GPU."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from knowgate.core.schema import read_record
from knowgate.errors import BadInput, BadSetting, MissingExtra
from knowgate.gates.judges.causal_judge import JudgeOptions
from knowgate.models import load_model
from knowgate.models.hf.loader import check_bits, load_transformers
from knowgate.training.judges.answer_judge import fit_answer_judge
from tests.support.judge_data import planted
from tests.support.tiny_models import save_word_llama

OPTIONS = {
    "base": "smollm",
    "base_fingerprint": "f",
    "wording": "w",
    "labels": ["Yes", "No"],
    "adapter_sha256": "0" * 64,
    "max_tokens": 512,
}


@pytest.fixture
def with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def base(tmp_path):
    return save_word_llama(tmp_path / "model")


def test_zero_bits_means_no_quantization():
    check_bits(0)


def test_other_numbers_of_bits_are_refused():
    with pytest.raises(BadSetting, match=r"bits=3 is not supported. Use 4 or 8"):
        check_bits(3)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantization_without_cuda_is_refused(bits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadSetting, match=f"bits={bits} needs a GPU with CUDA, but this machine has none"):
        check_bits(bits)


def test_without_bitsandbytes_the_extra_is_named(with_cuda, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"knowgate\[quantised\]"):
        check_bits(4)


def test_a_judge_is_refused_before_anything_is_loaded(base, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **options: pytest.fail("loaded"))
    with pytest.raises(BadSetting, match="needs a GPU with CUDA"):
        fit_answer_judge(planted(base, 60, by="draft"), bits=4, work=tmp_path)


@pytest.mark.parametrize("options", [{"full": True}, {"base": "small"}])
def test_full_training_of_quantized_weights_is_refused(options, base, tmp_path, with_cuda):
    with pytest.raises(BadSetting, match=r"bits=4 .* works only with LoRA on a decoder-only"):
        fit_answer_judge(planted(base, 60, by="draft"), bits=4, work=tmp_path, **options)


def test_transformers_quantizes_the_model_and_moves_it_to_the_gpu(base, with_cuda, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    received, network = {}, load_model(f"hf:{base}")

    def read(name, **options):
        received.update(options)
        return torch.nn.Identity()

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    loaded = load_transformers(network.source, bits=8)
    assert received["quantization_config"].load_in_8bit
    assert received["device_map"] == {"": 0}
    assert not loaded.model.training


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_the_bits_of_a_judge_are_read_from_its_folder(bits):
    assert read_record(JudgeOptions, {**OPTIONS, "bits": bits}, "options").bits == bits


@pytest.mark.parametrize("bits", [3, "4", 4.5, True])
def test_other_bits_in_a_folder_are_refused(bits):
    with pytest.raises(BadInput, match=r"bits is .*, not one of 0, 4, 8"):
        read_record(JudgeOptions, {**OPTIONS, "bits": bits}, "options")
