"""The real embedded model gives the same answers, token for token, however it is loaded and run."""

from __future__ import annotations

import gc

import pytest
import torch

from knowgate.models import embedded_weights as weights
from knowgate.models import load_model
from knowgate.models.gguf import convert_gguf
from knowgate.models.hf import local_model
from knowgate.models.hf.model import HFModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.types import Question, SignalRequest

pytestmark = pytest.mark.model
QUESTIONS = [Question(text) for text in ("What is the capital of France?", "Who wrote Hamlet?", "日本的首都是哪里?")]
PROMPTS = [AnswerPrompts().closed(question) for question in QUESTIONS]
TOKENS = 8


def texts(model):
    return [[token.text for token in row[0].tokens] for row in model.generate(PROMPTS, max_tokens=TOKENS)]


@pytest.fixture(scope="module")
def completions(smollm):
    """Its answers, generated once for all tests."""
    return [row[0] for row in smollm.generate(PROMPTS, max_tokens=TOKENS)]


@pytest.fixture(scope="module")
def answers(completions):
    """The tokens of its answers."""
    return [[token.text for token in completion.tokens] for completion in completions]


@pytest.fixture(scope="module")
def file():
    return weights.fetch_weights("smollm") / weights.get_weights("smollm").weight_file


@pytest.mark.slow
def test_hf_gguf_and_embedded_specs_give_the_same_answers(smollm, answers, file, shared_weights, monkeypatch):
    monkeypatch.setattr(local_model, "load_transformers", shared_weights)
    for spec in (f"hf:{convert_gguf(file)}", f"gguf:{file}"):
        model = load_model(spec)
        assert texts(model) == answers
        assert model.fingerprint == smollm.fingerprint
        del model  # one copy of the weights at a time
        gc.collect()


def test_decoding_equals_transformers_generate(smollm, answers):
    for prompt, ours in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([smollm.tokenize(smollm.render(prompt.text))])
        out = smollm.loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=smollm.pad_id
        )
        new = [token for token in out[0, ids.shape[1] :].tolist() if token not in smollm.stop_ids]
        assert [smollm.loaded.tokenizer.decode([token]) for token in new] == ours


def test_a_continued_draft_equals_plain_generation(smollm, answers):
    readings = smollm.read(PROMPTS, SignalRequest(draft_tokens=1, layers=(15,)))
    resumed = smollm.generate(PROMPTS, max_tokens=TOKENS, resume=[reading.resume for reading in readings])
    assert [[token.text for token in row[0].tokens] for row in resumed] == answers


def test_the_pipeline_skips_with_the_closed_book_answer(smollm, completions):
    from knowgate.gates import load_gate

    rag = AdaptiveRAG(smollm, load_gate("logprob:first"), threshold=1.0, max_tokens=TOKENS)
    ours = [answer.text for answer in rag.answer_many(QUESTIONS)]
    assert ours == [completion.text for completion in completions]
    assert "Paris" in ours[0]


@pytest.mark.slow
def test_shared_and_copied_prompt_caches_give_the_same_answers(smollm):
    want = SignalRequest(draft_tokens=6, samples=4, sample_tokens=6, seed=0, resumable=False)
    copying = HFModel(smollm.source)
    vars(copying).update(loaded=smollm.loaded, shares=False)
    for ours, plain in zip(smollm.read(PROMPTS, want), copying.read(PROMPTS, want), strict=True):
        assert [token.text for token in ours.draft.tokens] == [token.text for token in plain.draft.tokens]
        assert [t.logprob for t in ours.draft.tokens] == pytest.approx(
            [t.logprob for t in plain.draft.tokens], abs=1e-4
        )
        assert sum(a.text == b.text for a, b in zip(ours.samples, plain.samples, strict=True)) >= 3
