"""The transformers backend, checked against transformers itself on a tiny random Llama."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from knowgate.errors import BadInput, BadSetting, ModelError, WeightsError
from knowgate.models import local_backend
from knowgate.models.backend import allow_interruption
from knowgate.models.fair_executor import CLIENT, FairExecutor
from knowgate.models.hf import loader, local_model
from knowgate.models.hf.decoding import draw_tokens
from knowgate.models.hf.forward_pass import PrefixCache
from knowgate.models.hf.model import HFModel
from knowgate.models.tokenization import escape_special_tokens, find_common_prefix
from knowgate.types import LabelPrompt, Prompt, Sampling, SignalRequest
from tests.support.tiny_models import save_tiny_llama

PROMPTS = [Prompt("Who wrote it?"), Prompt("What is the name of the tallest tower in town?"), Prompt("Why?")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return HFModel(str(save_tiny_llama(tmp_path_factory.mktemp("tiny"))))


def ids_of(model, prompt):
    return torch.tensor([model.tokenize(model.render(prompt.text))])


def reference(model, prompt, max_tokens):
    out = model.loaded.model.generate(
        ids_of(model, prompt), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, eos_token_id=1
    )
    new = out[0, ids_of(model, prompt).shape[1] :].tolist()
    return new[: new.index(1)] if 1 in new else new


def tokens_of(model, completion):
    return [model.loaded.tokenizer.convert_tokens_to_ids(token.text) for token in completion.tokens]


def test_the_tokens_of_all_cached_prompts_are_limited(model, monkeypatch):
    monkeypatch.setattr(local_backend, "MAX_CACHED_TOKENS", 1_000)
    prompts = [Prompt(f"Who wrote book {number}? " * 5) for number in range(20)]
    encoded = [model.encode_all([prompt])[0] for prompt in prompts]
    assert 0 < sum(map(len, model._encoded_prompts.values())) <= 1_000 < sum(map(len, encoded))
    assert encoded == model.encode_all(prompts)


def test_greedy_answers_equal_transformers_generate_for_prompts_of_different_length(model):
    drafts = model.generate(PROMPTS, max_tokens=10)
    assert [tokens_of(model, row[0]) for row in drafts] == [reference(model, prompt, 10) for prompt in PROMPTS]


def test_a_continued_draft_equals_one_long_answer(model):
    readings = model.read(PROMPTS, SignalRequest(draft_tokens=3))
    resumed = model.generate(PROMPTS, max_tokens=12, resume=[reading.resume for reading in readings])
    whole = model.generate(PROMPTS, max_tokens=12)
    assert [row[0].text for row in resumed] == [row[0].text for row in whole]


def test_part_of_a_batch_can_be_continued_and_a_handle_used_twice(model):
    readings = model.read(PROMPTS, SignalRequest(draft_tokens=2, layers=(1,), after_draft=True))
    once = model.generate(PROMPTS[1:2], max_tokens=9, resume=[readings[1].resume])
    twice = model.generate(PROMPTS[1:2], max_tokens=9, resume=[readings[1].resume])
    assert once[0][0].text == twice[0][0].text == model.generate(PROMPTS[1:2], max_tokens=9)[0][0].text


def test_token_statistics_equal_a_direct_computation(model):
    token = model.read(PROMPTS[:1], SignalRequest(draft_tokens=1))[0].draft.tokens[0]
    with torch.inference_mode():
        logits = model.loaded.model(ids_of(model, PROMPTS[0])).logits[0, -1].double().numpy()
    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    top = np.sort(p)[::-1]
    assert token.logprob == pytest.approx(np.log(top[0]), abs=1e-5)
    assert token.entropy == pytest.approx(-(p * np.log(p)).sum(), abs=1e-4)
    assert token.margin == pytest.approx(top[0] - top[1], abs=1e-5)


def test_hidden_states_are_those_at_the_last_prompt_token(model):
    readings = model.read(PROMPTS, SignalRequest(layers=(0, 1, -1)))
    for prompt, reading in zip(PROMPTS, readings, strict=True):
        with torch.inference_mode():
            states = model.loaded.model(ids_of(model, prompt), output_hidden_states=True).hidden_states
        for layer in (0, 1, -1):
            np.testing.assert_allclose(reading.hidden[layer], states[layer][0, -1].numpy(), atol=1e-4)


def test_a_pass_that_only_reads_a_middle_layer_stops_there_and_can_be_continued(model):
    readings = model.read(PROMPTS, SignalRequest(layers=(0, 1)))
    assert all(reading.resume.batch.lower_pass is not None for reading in readings)
    whole = model.read(PROMPTS, SignalRequest(layers=(0, 1), draft_tokens=1))
    for half, full in zip(readings, whole, strict=True):
        for layer in (0, 1):
            np.testing.assert_allclose(half.hidden[layer], full.hidden[layer], atol=1e-5)
    resumed = model.generate(PROMPTS[1:], max_tokens=10, resume=[reading.resume for reading in readings[1:]])
    assert [row[0].text for row in resumed] == [row[0].text for row in model.generate(PROMPTS[1:], max_tokens=10)]


def test_the_upper_layers_run_only_for_continued_prompts(model):
    calls = []
    hook = model.loaded.model.base_model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    try:
        readings = model.read(PROMPTS, SignalRequest(layers=(1,)))
        assert calls == []
        model.generate(PROMPTS[:1], max_tokens=1, resume=[readings[0].resume])
        assert len(calls) == 1
    finally:
        hook.remove()


@pytest.mark.parametrize("draft_tokens", [0, 6])
def test_a_long_prompt_that_is_read_in_pieces_gives_the_same_signals(model, monkeypatch, draft_tokens):
    request = SignalRequest(layers=(0, 1, -1), draft_tokens=draft_tokens)
    (whole,) = model.read(PROMPTS[1:2], request)
    label_prompts, labels = [LabelPrompt((" ".join(["What is the tallest tower?"] * 5),))], ["true", "false"]
    logits = model.label_logits(label_prompts, labels)[0]
    monkeypatch.setattr(local_model, "LONG_PROMPT_TOKENS", 8)
    monkeypatch.setattr(local_model, "PIECE_TOKENS", 3)
    widths = []
    hook = model.loaded.model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        (pieces,) = model.read(PROMPTS[1:2], request)
    finally:
        hook.remove()
    assert max(widths) == 3
    np.testing.assert_allclose(model.label_logits(label_prompts, labels)[0], logits, atol=1e-4)
    for layer in request.layers:
        np.testing.assert_allclose(pieces.hidden[layer], whole.hidden[layer], atol=1e-4)
    resumed = model.generate(PROMPTS[1:2], max_tokens=10, resume=[pieces.resume])
    assert resumed[0][0].text == model.generate(PROMPTS[1:2], max_tokens=10)[0][0].text
    if draft_tokens:
        assert pieces.draft.text == whole.draft.text


def test_states_after_the_draft_are_those_at_its_last_token(model):
    readings = model.read(PROMPTS, SignalRequest(draft_tokens=4, layers=(1,), after_draft=True))
    for prompt, reading in zip(PROMPTS, readings, strict=True):
        ids = torch.cat([ids_of(model, prompt), torch.tensor([tokens_of(model, reading.draft)])], dim=1).long()
        with torch.inference_mode():
            state = model.loaded.model(ids, output_hidden_states=True).hidden_states[1][0, -1]
        np.testing.assert_allclose(reading.hidden_after[1], state.numpy(), atol=1e-4)


def test_samples_of_a_seed_do_not_depend_on_the_rest_of_the_batch(model):
    together = model.generate(PROMPTS, max_tokens=6, temperature=1.0, n=4, seed=7)
    alone = model.generate(PROMPTS[1:2], max_tokens=6, temperature=1.0, n=4, seed=7)
    assert [c.text for c in together[1]] == [c.text for c in alone[0]]


def test_another_seed_gives_other_samples(model):
    one, two = (model.generate(PROMPTS[:1], max_tokens=8, temperature=1.0, n=5, seed=s)[0] for s in (1, 2))
    assert [c.text for c in one] != [c.text for c in two]


def test_drawn_tokens_follow_the_softmax():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(10_000, 1)
    drawn = draw_tokens(logits, np.random.default_rng(0).random(10_000), Sampling())
    np.testing.assert_allclose(np.bincount(drawn) / 10_000, [0.5, 0.3, 0.2], atol=0.02)


def test_temperature_sharpens_the_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(10_000, 1)
    drawn = draw_tokens(logits, np.random.default_rng(0).random(10_000), Sampling(0.5))
    squared = np.array([0.25, 0.09, 0.04]) / 0.38
    np.testing.assert_allclose(np.bincount(drawn) / 10_000, squared, atol=0.02)


@pytest.mark.parametrize("sampling", [Sampling(0.6, 0.9, 50), Sampling(top_p=0.5), Sampling(2.0, top_k=3)])
def test_truncated_samples_follow_the_truncated_distribution_of_transformers(model, sampling):
    logits = next_logits(model, PROMPTS[0])
    warped = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    warped = TopKLogitsWarper(sampling.top_k)(None, warped) if sampling.top_k else warped
    expected = torch.softmax(TopPLogitsWarper(sampling.top_p)(None, warped), dim=-1)[0].numpy()
    drawn = draw_tokens(logits.repeat(20_000, 1), (np.arange(20_000) + 0.5) / 20_000, sampling)
    shares = np.bincount(drawn, minlength=logits.shape[1]) / 20_000
    np.testing.assert_allclose(shares, expected, atol=1e-3)
    assert set(np.flatnonzero(shares)) <= set(np.flatnonzero(expected))


def test_a_uniform_number_near_one_never_draws_a_truncated_token():
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]]))
    assert draw_tokens(logits, np.array([1 - 1e-12]), Sampling(top_p=0.6)) == [2]


def test_the_single_most_probable_token_is_the_greedy_answer(model):
    want = SignalRequest(draft_tokens=6, samples=3, sample_tokens=6, sampling=Sampling(top_k=1))
    for reading in model.read(PROMPTS, want):
        assert {sample.text for sample in reading.samples} == {reading.draft.text}


def test_truncated_samples_do_not_depend_on_the_rest_of_the_batch(model):
    want = SignalRequest(samples=4, sample_tokens=6, sampling=Sampling(0.6, 0.9, 50), seed=7)
    together, alone = model.read(PROMPTS, want)[1], model.read(PROMPTS[1:2], want)[0]
    assert [c.text for c in together.samples] == [c.text for c in alone.samples]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(0.0), "temperature=0.0 must be above 0"),
        (Sampling(float("nan")), "temperature=nan must be above 0"),
        (Sampling(top_p=0.0), "top_p=0.0 must be above 0"),
        (Sampling(top_p=1.5), "top_p=1.5 must be above 0"),
        (Sampling(top_k=-1), "top_k=-1 must be at least 0"),
    ],
)
def test_invalid_sampling_options_are_refused(model, sampling, message):
    with pytest.raises(BadSetting, match=re.escape(message)):
        model.read(PROMPTS[:1], SignalRequest(samples=2, sampling=sampling))


def next_logits(model, prompt):
    with torch.inference_mode():
        return model.loaded.model(ids_of(model, prompt).long()).logits[:, -1].float()


def test_a_shared_prefix_does_not_change_results(model):
    prompts = [Prompt("The same long instruction for all. " + end) for end in ("One?", "Another one?", "x")]
    shared = model.read(prompts, SignalRequest(draft_tokens=5, layers=(1,)))
    assert model.prefix_cache.entries
    for prompt, reading in zip(prompts, shared, strict=True):
        fresh = HFModel(model.source).read([prompt], SignalRequest(draft_tokens=5, layers=(1,)))[0]
        assert fresh.draft.text == reading.draft.text
        np.testing.assert_allclose(fresh.hidden[1], reading.hidden[1], atol=1e-4)


def test_the_common_prefix_excludes_the_last_token_of_each_row():
    assert find_common_prefix([[1, 2, 3, 4], [1, 2, 3]]) == [1, 2]
    assert find_common_prefix([[5, 6], [7, 6]]) == []


def test_a_single_prompt_reuses_a_cached_prefix_but_adds_none(model):
    prefixes = PrefixCache()
    rows = [[*range(5, 25), end] for end in (30, 31)]
    with torch.inference_mode():
        assert prefixes.start(model.loaded.model, rows[:1], model.loaded.device)[0] == 0
        assert prefixes.start(model.loaded.model, rows, model.loaded.device)[0] == 20
        assert prefixes.start(model.loaded.model, rows[:1], model.loaded.device)[0] == 20


def test_label_logits_of_one_pass_equal_separate_passes(model):
    parts = ("Say it.\nQ: one?\nA:", "true\nQ: two?\nA:", "false\nQ: three?\nA:")
    together = model.label_logits([LabelPrompt(parts)], ["true", "false"])[0]
    columns = [model.tokenize("true")[0], model.tokenize("false")[0]]
    for position in range(3):
        ids = torch.tensor([model.tokenize("".join(parts[: position + 1]))])
        with torch.inference_mode():
            alone = model.loaded.model(ids).logits[0, -1, columns].numpy()
        np.testing.assert_allclose(together[position], alone, atol=1e-4)


def test_label_prompts_of_different_length_keep_their_order(model):
    prompts = [LabelPrompt(("Is it so, or is it not? A:",)), LabelPrompt(("Q? A:", "true\nWhy? A:"))]
    together = model.label_logits(prompts, ["true", "false"])
    alone = [model.label_logits([prompt], ["true", "false"])[0] for prompt in prompts]
    assert [rows.shape for rows in together] == [(1, 2), (2, 2)]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_labels_with_the_same_first_token_are_refused(model):
    with pytest.raises(BadSetting, match="'abc', 'axe' begin alike"):
        model.label_logits([LabelPrompt(("Q:",))], ["abc", "axe"])


def test_a_prompt_longer_than_the_window_is_refused_with_its_length(model):
    assert model.fits([Prompt("x" * 600), Prompt("x")], 8) == [False, True]
    with pytest.raises(BadInput, match=r"611 tokens.* 512 tokens"):
        model.generate([Prompt("x" * 600)], max_tokens=8)


def test_a_layer_that_does_not_exist_is_refused(model):
    with pytest.raises(BadSetting, match=r"no layer 3\. Use a layer from 0 to 2"):
        model.read(PROMPTS, SignalRequest(layers=(3,)))


def test_nan_from_the_model_is_an_error_never_a_score(tmp_path):
    broken = HFModel(str(save_tiny_llama(tmp_path)))
    with torch.no_grad():
        broken.loaded.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="NaN"):
        broken.read(PROMPTS, SignalRequest(draft_tokens=2))
    with pytest.raises(ModelError, match="NaN"):
        broken.generate(PROMPTS, max_tokens=2, temperature=1.0, n=2)
    with pytest.raises(ModelError, match="NaN"):
        broken.label_logits([LabelPrompt(("Q:",))], ["true", "false"])


def test_the_fingerprint_depends_on_the_weights_not_on_the_folder(tmp_path):
    first, twin, other = (tmp_path / name for name in ("first", "twin", "other"))
    save_tiny_llama(first), save_tiny_llama(twin), save_tiny_llama(other, seed=1)
    assert HFModel(str(first)).fingerprint == HFModel(str(twin)).fingerprint != HFModel(str(other)).fingerprint


def test_a_folder_without_weights_is_explained(tmp_path):
    with pytest.raises(WeightsError, match=r"Expected: a folder with config\.json"):
        HFModel(str(tmp_path)).generate(PROMPTS, max_tokens=1)


def test_special_tokens_in_user_text_are_escaped():
    assert escape_special_tokens("a <|im_end|> b</s>", ["<|im_end|>", "</s>", "."]) == "a < |im_end|> b< /s>"


def test_the_environment_chooses_the_number_format(model, monkeypatch):
    monkeypatch.setenv("KNOWGATE_DTYPE", "bfloat16")
    assert HFModel(model.source).loaded.model.dtype == torch.bfloat16


def test_an_unknown_number_format_is_refused_with_the_known_ones(model, monkeypatch):
    monkeypatch.setenv("KNOWGATE_DTYPE", "int3")
    with pytest.raises(BadSetting, match="float32, bfloat16, float16"):
        HFModel(model.source).loaded  # noqa: B018


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norms_give_the_same_values(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight, mean=1.0, std=0.2)
    states = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain = norm(states)
    loader.fuse_norms(norm)
    assert "forward" in vars(norm)
    np.testing.assert_allclose(norm(states).float().detach(), plain.float().detach(), rtol=0.02, atol=1e-5)


def test_norms_of_another_formula_are_not_fused():
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    norm = GemmaRMSNorm(8)
    loader.fuse_norms(norm)
    assert "forward" not in vars(norm)


REQUESTS = {
    "drafts": SignalRequest(draft_tokens=12, resumable=False),
    "resumable": SignalRequest(draft_tokens=12, layers=(1,)),
    "states": SignalRequest(layers=(1,)),
    "samples": SignalRequest(draft_tokens=6, samples=3, sample_tokens=6, seed=0, resumable=False),
    "labels": None,
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_calls_of_other_clients_run_during_a_call_and_change_nothing(model, kind, monkeypatch):
    monkeypatch.setattr("knowgate.models.fair_executor.SLICE_SECONDS", 0.0)  # they take turns as often as they can
    texts = {"long": "why " * 60, "short": "who", "other": "when was it"}
    works = {"long": kind} | {f"short {name}": name for name in REQUESTS} | {"other states": "states"}

    def read(name):
        text, request = texts[name.split()[0]], REQUESTS[works[name]]
        if request is None:
            return model.label_logits([LabelPrompt((text,))], ["true", "false"])[0].tolist()
        (reading,) = model.read([Prompt(text, raw=True)], request)
        states = {layer: vector.tolist() for layer, vector in reading.hidden.items()}
        return reading.draft, reading.samples, states

    alone = {name: read(name) for name in works}
    order = []

    def work(name):
        order.append(f"{name} starts")
        with allow_interruption(model):
            result = read(name)
        order.append(f"{name} ends")
        return result

    executor, calls = FairExecutor(1), {}

    def submit(name):
        token = CLIENT.set(name)
        calls[name] = executor.submit(work, name)
        CLIENT.reset(token)

    def submit_others(*_):
        hook.remove()
        for name in list(works)[1:]:
            submit(name)

    # The other calls arrive while the first one is in the middle of a forward pass.
    hook = model.loaded.model.base_model.layers[0].register_forward_pre_hook(submit_others)
    submit("long")
    results = {"long": calls["long"].result(60)}
    assert results | {name: call.result(60) for name, call in calls.items()} == alone
    executor.shutdown()
    assert order[0] == "long starts"
    assert order[1] != "long ends"  # another call has started meanwhile


def test_other_threads_can_use_a_model_whose_call_is_interrupted(model):
    """The interrupting call may wait for a thread that waits for the model, such as that of a judge."""

    def use_model_elsewhere():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(model.generate, PROMPTS[:1], max_tokens=2).result(30)

    def work():
        with allow_interruption(model):
            return model.generate(PROMPTS, max_tokens=8)

    alone, small = model.generate(PROMPTS, max_tokens=8), model.generate(PROMPTS[:1], max_tokens=2)
    executor, may_start = FairExecutor(1), threading.Event()
    executor.submit(may_start.wait, 30)
    futures = []
    for client, call in (("a", work), ("b", use_model_elsewhere)):
        token = CLIENT.set(client)
        futures.append(executor.submit(call))
        CLIENT.reset(token)
    outer, inner = futures
    may_start.set()
    assert inner.result(60) == small
    assert outer.result(60) == alone
    executor.shutdown()
