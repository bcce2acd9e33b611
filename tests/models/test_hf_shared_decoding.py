"""Decoding over a shared prompt cache gives the same answers as decoding with a copy of the prompt per answer."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from knowgate.core.stop_flag import StopError, open_stoppable_context
from knowgate.errors import ModelError
from knowgate.models.hf import batching, decoding, shared_decoding
from knowgate.models.hf.model import HFModel
from knowgate.types import LabelPrompt, Prompt, Sampling, SignalRequest
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
    """Return a model with the same weights and other cached properties."""
    other = HFModel(model.source)
    vars(other).update(loaded=model.loaded, **changed)
    return other


def statistics(completion):
    return [(token.logprob, token.entropy, token.margin) for token in completion.tokens]


def assert_alike(ours, plain):
    for mine, other in zip(ours, plain, strict=True):
        assert mine.draft.text == other.draft.text
        assert (mine.draft.finished, mine.draft.n_tokens) == (other.draft.finished, other.draft.n_tokens)
        np.testing.assert_allclose(statistics(mine.draft), statistics(other.draft), atol=1e-4)
        assert [(one.text, one.finished) for one in mine.samples] == [(one.text, one.finished) for one in other.samples]
        for layer in other.hidden_after:
            np.testing.assert_allclose(mine.hidden_after[layer], other.hidden_after[layer], atol=1e-4)


@pytest.mark.parametrize("stop", [MANY, frozenset()])
@pytest.mark.parametrize("samples", [0, 6])
@pytest.mark.parametrize("sample_tokens", [9, 5])
def test_readings_equal_those_with_copied_prompts(model, stop, samples, sample_tokens):
    want = SignalRequest(
        draft_tokens=9, layers=(0, 2), after_draft=True, samples=samples, sample_tokens=sample_tokens, seed=1,
        resumable=False,
    )  # fmt: skip
    assert model.shares_prompt_cache
    ours = like(model, stop_ids=stop).read(PROMPTS, want)
    assert_alike(ours, like(model, stop_ids=stop, shares_prompt_cache=False).read(PROMPTS, want))
    if stop and samples:
        assert len({one.n_tokens for reading in ours for one in reading.samples}) > 2


@pytest.mark.parametrize("samples", [0, 6])
def test_several_prefills_give_the_answers_of_one(model, samples, monkeypatch):
    want = SignalRequest(
        draft_tokens=9, layers=(0, 2), after_draft=True, samples=samples, sample_tokens=9, seed=1, resumable=False
    )
    one_pass = like(model, stop_ids=MANY).read(PROMPTS, want)
    passes, prefill = [], decoding.prefill

    def counted(model, ids, *args, **kwargs):
        passes.append(len(ids))
        return prefill(model, ids, *args, **kwargs)

    monkeypatch.setattr("knowgate.models.hf.model.prefill", counted)
    monkeypatch.setattr(batching, "CPU_LIMITS", replace(batching.CPU_LIMITS, prompt_tokens=1))
    several = like(model, stop_ids=MANY).read(PROMPTS, want)
    assert passes == [1, 1, 1]
    assert_alike(several, one_pass)
    for mine, other in zip(several, one_pass, strict=True):
        np.testing.assert_allclose(mine.hidden[2], other.hidden[2], atol=1e-4)


def test_answers_that_may_be_continued_are_not_joined(model, monkeypatch):
    monkeypatch.setattr(batching, "CPU_LIMITS", replace(batching.CPU_LIMITS, prompt_tokens=1))
    monkeypatch.setattr("knowgate.models.hf.model.join_prefills", pytest.fail)
    (first, *_) = model.read(PROMPTS, SignalRequest(draft_tokens=2))
    assert model.generate(PROMPTS[:1], max_tokens=5, resume=[first.resume])[0][0].n_tokens >= 2


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(top_p=0.8), Sampling(top_k=5)])
def test_samples_are_equal_for_all_truncations(model, sampling):
    want = SignalRequest(draft_tokens=6, samples=5, sample_tokens=6, seed=2, sampling=sampling, resumable=False)
    assert_alike(model.read(PROMPTS, want), like(model, shares_prompt_cache=False).read(PROMPTS, want))


@pytest.mark.parametrize("read_end_token", [False, True])
@pytest.mark.parametrize("interval", [1, 4])
def test_final_states_equal_those_of_plain_decoding(model, read_end_token, interval, monkeypatch):
    monkeypatch.setitem(shared_decoding.CHECK_INTERVALS, "cpu", interval)
    ids = [*model.encode_all(PROMPTS)]
    uniforms = np.random.default_rng(0).random((15, 6))
    with torch.inference_mode():
        stream = decoding.prefill(model, ids, [1])
        generation = shared_decoding.SharedGeneration(stream, uniforms, Sampling(), MANY, read_end_token=read_end_token)
        ours = generation.run([1]).split().samples
        copies = stream.copy(range(3), repeat=5)
        plain = decoding.sample_rows(copies, uniforms, Sampling(), MANY, [1], read_end_token=read_end_token)
    for mine, other in zip(ours, plain, strict=True):
        assert (mine.tokens, mine.finished) == (other.tokens, other.finished)
        np.testing.assert_allclose(mine.states[1], other.states[1], atol=1e-4)


def test_rare_checks_change_no_answer(model, monkeypatch):
    want = SignalRequest(
        draft_tokens=10, layers=(1,), after_draft=True, samples=6, sample_tokens=10, seed=3, resumable=False
    )
    often = like(model, stop_ids=MANY).read(PROMPTS, want)
    monkeypatch.setitem(shared_decoding.CHECK_INTERVALS, "cpu", 4)
    assert_alike(like(model, stop_ids=MANY).read(PROMPTS, want), often)


def test_ended_answers_are_removed_from_the_batch(model, monkeypatch):
    fed, feed = [], shared_decoding.SharedDecodingBatch.feed

    def counted(self, tokens, layers):
        fed.append(tokens.numel())
        return feed(self, tokens, layers)

    monkeypatch.setattr(shared_decoding.SharedDecodingBatch, "feed", counted)
    want = SignalRequest(draft_tokens=12, samples=20, sample_tokens=12, seed=1, resumable=False)
    like(model, stop_ids=MANY).read(PROMPTS, want)
    assert fed[0] > 1.5 * fed[-1]
    assert fed == sorted(fed, reverse=True)


def test_nan_logits_are_an_error(tmp_path):
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


@pytest.mark.parametrize(("prompt_width", "n_rows"), [(5, 13), (500, 40)])
def test_answers_get_copies_of_short_prompts_if_that_leaves_fewer_rows(prompt_width, n_rows):
    is_fed = np.zeros((4, 12), bool)
    is_fed[0, 2:], is_fed[1:, 3] = True, True
    cache = SimpleNamespace(prompt_width=prompt_width, max_tokens=10)
    generation = SimpleNamespace(batch=SimpleNamespace(cache=cache))
    prompts, columns = shared_decoding.SharedGeneration._choose_shape(generation, is_fed)
    assert columns.size == n_rows
    kept = {(prompt, column) for prompt, row in zip(prompts, columns, strict=True) for column in row}
    assert kept >= set(zip(*np.nonzero(is_fed), strict=True))


def test_texts_are_decoded_in_a_thread_of_their_own(model, monkeypatch):
    threads, make = set(), HFModel._make_completion

    def watched(self, row, **options):
        threads.add(threading.current_thread().name.rstrip("0_"))
        return make(self, row, **options)

    monkeypatch.setattr(HFModel, "_make_completion", watched)
    model.read(PROMPTS, SignalRequest(draft_tokens=3, samples=2, sample_tokens=3, resumable=False))
    assert threads == {"knowgate-read"}


# --- stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares_prompt_cache", [True, False])
@pytest.mark.parametrize(
    "signals",
    [
        SignalRequest(draft_tokens=12, resumable=False),
        SignalRequest(draft_tokens=12),
        SignalRequest(samples=2, sample_tokens=12, resumable=False),
    ],
    ids=["drafts", "resumable drafts", "samples"],
)
def test_generation_stops_before_the_next_token_if_nobody_waits(model, shares_prompt_cache, signals):
    endless, passes = like(model, stop_ids=frozenset(), shares_prompt_cache=shares_prompt_cache), []
    with ExitStack() as waiting:
        context = waiting.enter_context(open_stoppable_context())

        def stop_after_three(*_):
            passes.append(1)
            if len(passes) == 3:
                waiting.close()

        hook = model.loaded.model.register_forward_hook(stop_after_three)
        try:
            with pytest.raises(StopError):
                context.run(endless.read, PROMPTS, signals)
        finally:
            hook.remove()
    assert len(passes) == 3
    assert endless.read(PROMPTS, signals)[0] is not None  # the model can be used afterwards


@pytest.mark.parametrize(
    "work",
    [
        lambda model: model.read(PROMPTS, SignalRequest(draft_tokens=4)),
        lambda model: model.read(PROMPTS, SignalRequest(layers=(-1,))),
        lambda model: model.generate(PROMPTS, max_tokens=4),
        lambda model: list(model.stream(PROMPTS[0], max_tokens=4)),
        lambda model: model.label_logits([LabelPrompt(("Is it true?",))], ["true", "false"]),
    ],
    ids=["drafts", "hidden states", "answers", "stream", "labels"],
)
def test_reading_a_prompt_stops_before_the_next_layer_if_nobody_waits(model, work):
    fresh, passed = like(model), []
    layers = model.loaded.model.base_model.layers
    with ExitStack() as waiting:
        context = waiting.enter_context(open_stoppable_context())

        def leave(*_):
            passed.append(0)
            waiting.close()

        hooks = [layers[0].register_forward_hook(leave), layers[1].register_forward_hook(lambda *_: passed.append(1))]
        try:
            with pytest.raises(StopError):
                context.run(work, fresh)
        finally:
            for hook in hooks:
                hook.remove()
    assert passed == [0]  # the second layer did not run
    assert str(work(fresh)) == str(work(like(model)))  # the next request is answered as by a model that was not stopped


def test_a_draft_is_cut_to_the_maximum_length(model):
    endless = like(model, stop_ids=frozenset())
    handles = [reading.resume for reading in endless.read(PROMPTS, SignalRequest(draft_tokens=9))]
    expected = [row[0] for row in endless.generate(PROMPTS, max_tokens=3)]
    cut = [row[0] for row in endless.generate(PROMPTS, max_tokens=3, resume=handles)]
    assert [(one.text, one.n_tokens, one.finished) for one in cut] == [(one.text, 3, False) for one in expected]
    assert "".join(endless.stream(PROMPTS[0], max_tokens=3, resume=handles[0])).strip() == expected[0].text.strip()
