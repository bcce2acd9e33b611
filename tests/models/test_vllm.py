"""The vLLM backend, on a stand-in for vLLM, agrees with the transformers backend on the same weights."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from knowgate.errors import BadInput, BadSetting, MissingExtra, UnsupportedSignal
from knowgate.gates import load_gate
from knowgate.gates.scoring import bind_gate
from knowgate.labels.labeling import label
from knowgate.models import load_model
from knowgate.models.hf.model import HFModel
from knowgate.models.openai import responses
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.models.vllm import _parse_answer
from knowgate.types import LabelPrompt, Prompt, Question, Sampling, Signal, SignalRequest
from tests.support import vllm_double
from tests.support.tiny_models import save_tiny_llama

PROMPTS = [Prompt("Who wrote it?"), Prompt("What is the name of the tower in town?"), Prompt("Why?", raw=True)]
TOKENS = 8


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return HFModel(str(save_tiny_llama(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture
def model(hf, monkeypatch):
    vllm_double.install(monkeypatch)
    return load_model(f"vllm:{hf.source}")


def assert_same_answers(ours, theirs):
    assert [answer.text for answer in ours] == [answer.text for answer in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.n_tokens, mine.finished) == (other.n_tokens, other.finished)
        assert [token.text for token in mine.tokens] == [token.text for token in other.tokens]
        for name in ("logprob", "margin"):
            values = [[getattr(token, name) for token in answer.tokens] for answer in (mine, other)]
            assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_drafts_and_their_log_probabilities_are_those_of_transformers(model, hf):
    want = SignalRequest(draft_tokens=TOKENS)
    ours, theirs = ([reading.draft for reading in each.read(PROMPTS, want)] for each in (model, hf))
    assert_same_answers(ours, theirs)
    assert all(token.entropy is None for draft in ours for token in draft.tokens)


def test_all_prompts_are_one_batch(model):
    model.read(PROMPTS, SignalRequest(draft_tokens=2))
    assert model.engine.batches == [3]


def test_entropies_are_computed_on_demand(model, hf, monkeypatch):
    monkeypatch.setattr(responses, "MIN_TOKENS_FOR_ENTROPY", 10)  # the vocabulary is small
    want = SignalRequest(draft_tokens=4, entropies=True)
    ours, theirs = (each.read(PROMPTS[:1], want)[0].draft.tokens for each in (model, hf))
    assert [token.entropy for token in ours] == pytest.approx([token.entropy for token in theirs], abs=1e-4)


def test_the_token_that_ends_an_answer_is_not_part_of_it(model):
    ended = SimpleNamespace(token_ids=[5, 6, 1], finish_reason="stop", logprobs=None)
    cut = SimpleNamespace(token_ids=[5, 6, 7], finish_reason="length", logprobs=None)
    answers = [_parse_answer(output) for output in (ended, cut)]
    assert [(answer.tokens, answer.finished) for answer in answers] == [([5, 6], True), ([5, 6, 7], False)]


def test_a_draft_is_continued_to_the_whole_answer(model, hf):
    handles = [reading.resume for reading in model.read(PROMPTS, SignalRequest(draft_tokens=3))]
    resumed = [row[0] for row in model.generate(PROMPTS, max_tokens=TOKENS, resume=handles)]
    assert_same_answers(resumed, [row[0] for row in hf.generate(PROMPTS, max_tokens=TOKENS)])
    with pytest.raises(BadSetting, match="cannot continue"):
        model.generate(PROMPTS[:1], max_tokens=TOKENS, resume=["another model's handle"])


def test_a_finished_draft_is_not_continued(model):
    [reading] = model.read(PROMPTS[:1], SignalRequest(draft_tokens=TOKENS))
    model.engine.batches.clear()
    [[same]] = model.generate(PROMPTS[:1], max_tokens=TOKENS, resume=[reading.resume])
    assert same == reading.draft
    assert model.engine.batches == []


def test_a_stream_returns_the_whole_answer(model, hf):
    stream, pieces = model.stream(PROMPTS[0], max_tokens=TOKENS), []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            answer = end.value
            break
    assert "".join(pieces).strip() == answer.text
    assert_same_answers([answer], [hf.generate(PROMPTS[:1], max_tokens=TOKENS)[0][0]])


def test_samples_follow_their_seed_and_their_sampling(model, hf):
    want = SignalRequest(samples=4, sample_tokens=5, seed=3)
    first, second = (model.read(PROMPTS, want) for _ in range(2))
    assert [reading.samples for reading in first] == [reading.samples for reading in second]
    assert len({sample.text for sample in first[0].samples}) > 1
    assert all(reading.draft is None for reading in first)
    narrow = model.read(PROMPTS, SignalRequest(samples=2, sample_tokens=5, sampling=Sampling(1.0, top_k=1)))
    greedy = [row[0].text for row in hf.generate(PROMPTS, max_tokens=5)]
    assert [[sample.text for sample in reading.samples] for reading in narrow] == [[text] * 2 for text in greedy]


def test_label_probabilities_are_those_of_transformers(model, hf):
    parts = ("Is it so? A:", "true\nIs it not? A:", "false\nIs it? A:")
    prompts = [LabelPrompt(parts, prefix="Say true or false.\n"), LabelPrompt(("Is it?",), raw=False)]
    ours, theirs = (each.label_logits(prompts, ("true", "false")) for each in (model, hf))
    assert [rows.shape for rows in ours] == [(3, 2), (1, 2)]
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine[:, 0] - mine[:, 1], other[:, 0] - other[:, 1], atol=1e-4)


def test_the_log_probability_of_an_answer_is_that_of_transformers(model, hf):
    answers = ["a tower", "me", "no"]
    ours, theirs = (each.answer_logprobs(PROMPTS, answers) for each in (model, hf))
    assert ours == pytest.approx(theirs, abs=1e-4)


def test_hidden_states_are_refused(model):
    assert Signal.HIDDEN not in model.offers
    with pytest.raises(UnsupportedSignal, match=r"returns no hidden states\. Use hf:NAME"):
        model.read(PROMPTS, SignalRequest(draft_tokens=1, layers=(1,)))
    with pytest.raises(UnsupportedSignal, match="hidden"):
        bind_gate(load_gate("seakr"), model, AnswerPrompts())


def test_a_prompt_beyond_the_context_window_is_refused(model):
    assert model.fits([Prompt("a" * 600), Prompt("a")], 4) == [False, True]
    with pytest.raises(BadInput, match="512 tokens"):
        model.generate([Prompt("a" * 600)], max_tokens=4)


def test_the_fingerprint_names_the_engine_and_the_weights(model, hf):
    assert model.fingerprint == f"vllm-{hf.fingerprint}"


def test_a_label_run_is_made_in_batches(model, tmp_path):
    questions = [Question(f"Who is {name}?", id=name, answers=("me",)) for name in ("a", "b", "c", "d")]
    folder = label(questions, model=model, samples=2, out=tmp_path / "run", layers="none")
    rows = list(folder.rows())
    assert [row.error for row in rows] == [None] * 4
    assert all(len(row.closed.samples) == 2 and row.closed.tokens for row in rows)
    assert max(model.engine.batches) == 4


def test_without_vllm_the_extra_is_named(hf, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match=r"knowgate\[vllm\]"):
        load_model(f"vllm:{hf.source}").generate(PROMPTS, max_tokens=2)
