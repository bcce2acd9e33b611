"""Answers chosen on the device: those that decoding row by row gives, with a copy of the prompt for each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from knowgate.errors import ModelError
from knowgate.models.hf import decoding
from knowgate.models.hf import shared_decoding as growing
from knowgate.models.hf.model import HFModel
from knowgate.types import Prompt, Sampling, SignalRequest
from tests.support.byte_llama import save_byte_llama
from tests.support.tiny_models import save_tiny_llama

PROMPTS = [
    Prompt("Answer the question in a few words.\nWho wrote it?"),
    Prompt("Answer the question in a few words.\nWhat is the name of the tallest tower in town?"),
    Prompt("Answer the question in a few words.\nWhy?"),
]
MANY = frozenset(range(1, 25))  # a third of the tiny model's tokens: some answers end at once, others never


@pytest.fixture(scope="module", params=[save_tiny_llama, save_byte_llama])
def model(request, tmp_path_factory):
    return HFModel(str(request.param(tmp_path_factory.mktemp("tiny"))))


def like(model, **changed):
    """The same weights with another way to answer."""
    other = HFModel(model.source)
    vars(other).update(loaded=model.loaded, **changed)
    return other


def figures(completion):
    return [(token.logprob, token.entropy, token.margin) for token in completion.tokens]


def assert_alike(ours, plain):
    for mine, other in zip(ours, plain, strict=True):
        assert mine.draft.text == other.draft.text
        assert (mine.draft.finished, mine.draft.n_tokens) == (other.draft.finished, other.draft.n_tokens)
        np.testing.assert_allclose(figures(mine.draft), figures(other.draft), atol=1e-4)
        assert [(one.text, one.finished) for one in mine.samples] == [(one.text, one.finished) for one in other.samples]
        for layer in other.hidden_after:
            np.testing.assert_allclose(mine.hidden_after[layer], other.hidden_after[layer], atol=1e-4)


@pytest.mark.parametrize("stop", [MANY, frozenset()])
@pytest.mark.parametrize("samples", [0, 6])
@pytest.mark.parametrize("sample_tokens", [9, 5])
def test_readings_are_those_of_rows_that_copy_their_prompt(model, stop, samples, sample_tokens):
    want = SignalRequest(
        draft_tokens=9, layers=(0, 2), after_draft=True, samples=samples, sample_tokens=sample_tokens, seed=1,
        resumable=False,
    )  # fmt: skip
    assert model.shares
    ours = like(model, stop=stop).read(PROMPTS, want)
    assert_alike(ours, like(model, stop=stop, shares=False).read(PROMPTS, want))
    if stop and samples:
        assert len({one.n_tokens for reading in ours for one in reading.samples}) > 2


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(top_p=0.8), Sampling(top_k=5)])
def test_samples_are_drawn_alike_however_they_are_cut_off(model, sampling):
    want = SignalRequest(draft_tokens=6, samples=5, sample_tokens=6, seed=2, sampling=sampling, resumable=False)
    assert_alike(model.read(PROMPTS, want), like(model, shares=False).read(PROMPTS, want))


@pytest.mark.parametrize("past_end", [False, True])
@pytest.mark.parametrize("patience", [1, 4])
def test_the_states_at_the_ends_are_those_of_rows_that_are_looked_at_in_every_step(
    model, past_end, patience, monkeypatch
):
    monkeypatch.setitem(growing.CHECK_INTERVALS, "cpu", patience)
    ids = [model.encode(prompt) for prompt in PROMPTS]
    uniforms = np.random.default_rng(0).random((15, 6))
    with torch.inference_mode():
        stream = decoding.prefill(model.loaded.model, ids, model.pad, model.loaded.device, [1])
        ours = growing.sample_shared(stream, uniforms, Sampling(), MANY, [1], past_end=past_end)
        copies = stream.copy(range(3), repeat=5)
        plain = decoding.sample_rows(copies, uniforms, Sampling(), MANY, [1], past_end=past_end)
    for mine, other in zip(ours, plain, strict=True):
        assert (mine.tokens, mine.finished) == (other.tokens, other.finished)
        np.testing.assert_allclose(mine.after[1], other.after[1], atol=1e-4)


def test_looking_seldom_changes_no_answer(model, monkeypatch):
    want = SignalRequest(
        draft_tokens=10, layers=(1,), after_draft=True, samples=6, sample_tokens=10, seed=3, resumable=False
    )
    often = like(model, stop=MANY).read(PROMPTS, want)
    monkeypatch.setitem(growing.CHECK_INTERVALS, "cpu", 4)
    assert_alike(like(model, stop=MANY).read(PROMPTS, want), often)


def test_answers_that_have_ended_are_no_longer_fed(model, monkeypatch):
    fed, feed = [], growing.SharedDecodingBatch.feed

    def counted(self, tokens, layers):
        fed.append(tokens.numel())
        return feed(self, tokens, layers)

    monkeypatch.setattr(growing.SharedDecodingBatch, "feed", counted)
    want = SignalRequest(draft_tokens=12, samples=20, sample_tokens=12, seed=1, resumable=False)
    like(model, stop=MANY).read(PROMPTS, want)
    assert fed[0] > 1.5 * fed[-1]
    assert fed == sorted(fed, reverse=True)


def test_nan_is_an_error_on_the_device_too(tmp_path):
    broken = HFModel(str(save_tiny_llama(tmp_path)))
    with torch.no_grad():
        broken.loaded.model.model.norm.weight.fill_(float("nan"))
    for want in (
        SignalRequest(draft_tokens=3, resumable=False),
        SignalRequest(samples=2, sample_tokens=3, resumable=False),
    ):
        with pytest.raises(ModelError, match="NaN"):
            broken.read(PROMPTS, want)


def test_a_draft_of_no_tokens_has_the_states_at_the_end_of_the_prompt(model):
    want = SignalRequest(layers=(1,), after_draft=True, samples=2, sample_tokens=2, seed=0, resumable=False)
    reading = model.read(PROMPTS[:1], want)[0]
    np.testing.assert_array_equal(reading.hidden_after[1], reading.hidden[1])
