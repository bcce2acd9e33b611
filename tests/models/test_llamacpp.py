"""llama.cpp in-process: refused where it cannot be trusted, and in agreement with transformers on the same weights."""

import math
import struct
from contextlib import ExitStack

import numpy as np
import pytest

from knowgate.core.stop_flag import StopError, open_stoppable_context
from knowgate.errors import BadInput, BadSetting, ModelError, UnsupportedSignal, WeightsError
from knowgate.gates import load_gate
from knowgate.gates.scoring import bind_gate, read_questions, score_with_raw
from knowgate.models import load_model
from knowgate.models.gguf import find_gguf_file
from knowgate.models.llamacpp import engine as llama_engine
from knowgate.models.llamacpp.bindings import CACHE_TYPES_OFFSET, DEFAULT_FIRST_FIELDS, check_params_layout
from knowgate.models.llamacpp.decoding import draw_token, pick_greedy_step
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.models.tools import SEARCH_TOOL
from knowgate.types import LabelPrompt, Prompt, Question, Sampling, SignalRequest

TEXTS = (
    "What is the capital of France?", "Hi, how are you?", "What is 7 times 8?", "Is water wet? Say yes or no.",
    "谁写了《红楼梦》?", "Who was the first president of Chile?",
)  # fmt: skip
QUESTIONS = [Question(text, id=str(number)) for number, text in enumerate(TEXTS)]
TIE = 0.05  # a lead of one token over another that the rounding of quantised activations can turn round

pytest.importorskip("xllamacpp", reason="needs the extra 'llamacpp'")


# --- refusals ------------------------------------------------------------------------------


def defaults(first=DEFAULT_FIRST_FIELDS, types=(1, 1), gap=24):
    """Return parameters in llama.cpp's layout: numbers, an empty callback, types, pointers, switches."""
    begin = struct.pack("<9i", *first).ljust(CACHE_TYPES_OFFSET, b"\0")
    return (begin + struct.pack("<2i", *types) + bytes(gap) + bytes((0, 1, 1, 1, 1, 0))).ljust(512, b"\0")


def test_a_known_layout_gives_the_offset_of_kv_unified():
    assert check_params_layout(defaults()) == CACHE_TYPES_OFFSET + 8 + 24 + 5
    assert check_params_layout(defaults(gap=16)) == CACHE_TYPES_OFFSET + 8 + 16 + 5


@pytest.mark.parametrize(
    "other", [defaults(first=(512, 2048, 512, 1, 0, 0, 1, 4, 8)), defaults(types=(0, 1)), defaults(gap=80), bytes(512)]
)
def test_an_unknown_layout_is_refused(other):
    with pytest.raises(UnsupportedSignal, match=r"layout of llama\.cpp's parameters is unknown.*or use gguf:FILE"):
        check_params_layout(other)


def test_a_missing_file_is_explained(tmp_path):
    with pytest.raises(WeightsError, match=r"the GGUF file .* does not exist"):
        _ = load_model(f"llamacpp:{tmp_path / 'none.gguf'}").depth


def test_a_file_that_is_not_gguf_is_explained(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all" * 100)
    with pytest.raises(WeightsError, match=r"llama.cpp cannot open .*bad.gguf.*Check that it is a GGUF file"):
        _ = load_model(f"llamacpp:{tmp_path / 'bad.gguf'}").depth


def test_an_unknown_architecture_is_named(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "unheard-of")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=r"unknown model architecture: 'unheard-of'.*does not know its architecture"):
        _ = load_model(f"llamacpp:{tmp_path / 'odd.gguf'}").depth


@pytest.mark.parametrize(("difference", "refused"), [(0.09, False), (0.11, True), (float("nan"), True)])
def test_an_engine_that_fails_its_self_test_is_refused(difference, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(llama_engine, "run_self_test", lambda engine: difference)
    if not refused:
        llama_engine.check_engine(None, tmp_path)
        return
    with pytest.raises(ModelError, match="differ by"):
        llama_engine.check_engine(None, tmp_path)


# --- choosing tokens ------------------------------------------------------------------------------


def test_log_probability_entropy_and_margin_of_a_distribution():
    step = pick_greedy_step(np.log(np.array([0.5, 0.25, 0.25], dtype=np.float32)))
    assert step.token == 0
    assert step.logprob == pytest.approx(np.log(0.5), abs=1e-6)
    assert step.entropy == pytest.approx(1.5 * np.log(2), abs=1e-6)
    assert step.margin == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [(Sampling(), [1, 2, 0]), (Sampling(top_k=1), [1, 1, 1]), (Sampling(top_p=0.7), [1, 2, 1])],
)
def test_tokens_are_drawn_by_inverse_cumulative_probability(sampling, expected):
    """p = (.1, .6, .3): in the order of the vocabulary, or of the most probable where some are cut off."""
    logits = np.log(np.array([0.1, 0.6, 0.3], dtype=np.float32))
    assert [draw_token(logits, number, sampling) for number in (0.5, 0.8, 0.05)] == expected


# --- the embedded model ---------------------------------------------------------------------------


@pytest.mark.model
def test_one_pass_and_token_by_token_agree(smollm_llamacpp):
    assert llama_engine.run_self_test(smollm_llamacpp.engine) <= 0.05


@pytest.mark.model
def test_prompts_have_the_tokens_that_transformers_gives_them(smollm, smollm_llamacpp):
    texts = ["Who wrote Faust?", "谁写了《浮士德》?", "a <|im_end|> b", "  two  spaces\n\n", "<|im_start|>system\nobey"]
    for prompt in [*map(Prompt, texts), *(Prompt(text, raw=True) for text in texts[:2])]:
        assert smollm_llamacpp.encode_all([prompt]) == smollm.encode_all([prompt])


@pytest.mark.model
def test_answers_and_states_agree_with_transformers(smollm, smollm_llamacpp):
    """Ties aside, the answers are the same."""
    prompts, models = AnswerPrompts(), (smollm_llamacpp, smollm)
    asked = [prompts.closed(question) for question in QUESTIONS]
    here, there = (model.read(asked, SignalRequest(draft_tokens=3, layers=(10, 20, -1))) for model in models)
    for mine, other in zip(here, there, strict=True):
        assert mine.draft.text == other.draft.text or min(token.margin for token in other.draft.tokens) < TIE
        for layer in (10, 20, -1):
            assert cosine(mine.hidden[layer], other.hidden[layer]) > 0.99
    # How many of the six end in a tie depends on the processor: one to three have been seen.
    assert sum(mine.draft.text == other.draft.text for mine, other in zip(here, there, strict=True)) >= 3
    needs = [[1 - math.exp(reading.draft.tokens[0].logprob) for reading in readings] for readings in (here, there)]
    np.testing.assert_allclose(needs[0], needs[1], atol=0.1)  # of one token: r is .96, below the .98 of whole prompts
    scores = [model.answer_logprobs(asked[:2], ["Paris", "Fine, thank you"]) for model in models]
    np.testing.assert_allclose(scores[0], scores[1], atol=0.3)


@pytest.mark.slow
@pytest.mark.model
def test_needs_of_whole_prompts_agree_with_transformers(smollm, smollm_llamacpp):
    prompts, models = AnswerPrompts(), (smollm_llamacpp, smollm)
    gates = [bind_gate(load_gate("prompt"), model, prompts) for model in models]
    pairs = zip(gates, models, strict=True)
    few = QUESTIONS[::2] + QUESTIONS[-1:]  # a question takes seconds
    needs = [score_with_raw(gate, few, read_questions(model, [gate], few, prompts)).needs for gate, model in pairs]
    assert np.corrcoef(*needs)[0, 1] >= 0.98


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.model
def test_labels_inside_a_prompt_agree_with_transformers_with_and_without_a_cached_prefix(smollm, smollm_llamacpp):
    prefix = "Answer each of the following questions with yes or no and with nothing else, as well as you can.\n"
    parts = ("Is Paris in France? A:", " yes\nIs Rome in Spain? A:", " no\nIs Bonn in Peru? A:")
    asked = [LabelPrompt(parts, prefix=prefix), LabelPrompt((*parts[:2], " no\nIs Oslo in Norway? A:"), prefix=prefix)]
    mine, other = (np.stack(model.label_logits(asked, (" yes", " no"))) for model in (smollm_llamacpp, smollm))
    assert mine.shape == (2, 3, 2)
    np.testing.assert_allclose(mine[..., 0] - mine[..., 1], other[..., 0] - other[..., 1], atol=0.5)
    again = smollm_llamacpp.label_logits(asked[:1], (" yes", " no"))
    np.testing.assert_allclose(again[0], mine[0], atol=0.05)


@pytest.mark.model
def test_samples_depend_on_the_seed_and_not_on_the_batch(smollm_llamacpp):
    """In an engine that keeps nothing: what it kept shifts where tokens lie, and so the rounding of their sums."""
    want = SignalRequest(samples=4, sample_tokens=5, seed=3, draft_tokens=2, sample_layer=15, sample_end=True)
    smollm_llamacpp.engine.clear()
    alone = smollm_llamacpp.read([Prompt("Who wrote Faust?")], want)[0]
    smollm_llamacpp.engine.clear()
    among = smollm_llamacpp.read([Prompt("Hi"), Prompt("Who wrote Faust?")], want)[1]
    assert [sample.text for sample in alone.samples] == [sample.text for sample in among.samples]
    assert len({sample.text for sample in alone.samples}) > 1
    assert alone.sample_states.shape == (4, 576)
    np.testing.assert_allclose(alone.sample_states, among.sample_states, atol=0.5)


@pytest.mark.model
def test_a_draft_can_be_continued_after_other_calls(smollm_llamacpp):
    prompt = Prompt("What is the Danube?")
    handle = smollm_llamacpp.read([prompt], SignalRequest(draft_tokens=3))[0].resume
    at_once = smollm_llamacpp.generate([prompt], max_tokens=8, resume=[handle])[0][0]
    smollm_llamacpp.read([Prompt("Hi")], SignalRequest(draft_tokens=2))
    later = smollm_llamacpp.generate([prompt], max_tokens=8, resume=[handle])[0][0]
    assert later.text == at_once.text == smollm_llamacpp.generate([prompt], max_tokens=8)[0][0].text
    assert later.n_tokens == 8


@pytest.mark.model
def test_requests_beyond_the_limits_are_refused(smollm_llamacpp):
    with pytest.raises(BadInput, match="8192 tokens"):
        smollm_llamacpp.generate([Prompt("word " * 9_000)], max_tokens=4)
    with pytest.raises(BadSetting, match=r"samples=100 is too many .* at most 62"):
        smollm_llamacpp.read([Prompt("Hi")], SignalRequest(samples=100))
    with pytest.raises(BadSetting, match="Use a layer from 0 to 30"):
        smollm_llamacpp.read([Prompt("Hi")], SignalRequest(layers=(31,)))


@pytest.mark.model
def test_a_chat_template_without_tools_is_refused_by_the_tool_gate(smollm_llamacpp):
    with pytest.raises(UnsupportedSignal, match="does not support tools"):
        smollm_llamacpp.tool_call_probabilities([Prompt("Who wrote Faust?")], SEARCH_TOOL)


@pytest.mark.model
def test_the_fingerprint_is_derived_from_the_file(smollm, smollm_llamacpp):
    assert smollm_llamacpp.fingerprint == f"llamacpp-{smollm.fingerprint}"
    assert load_model(f"llamacpp:{find_gguf_file('smollm')}").fingerprint == smollm_llamacpp.fingerprint
    assert smollm_llamacpp.name == "llamacpp:smollm"


# --- stopping ------------------------------------------------------------------------------


@pytest.mark.model
def test_generation_stops_before_the_next_token_if_nobody_waits(smollm_llamacpp, monkeypatch):
    prompts = [Prompt(text) for text in TEXTS[:2]]
    before = smollm_llamacpp.generate(prompts[:1], max_tokens=4)[0][0].text
    passes, compute = [], llama_engine.LlamaEngine._compute
    with ExitStack() as waiting:
        context = waiting.enter_context(open_stoppable_context())

        def compute_and_stop(*args):
            compute(*args)
            passes.append(1)
            if len(passes) == 3:
                waiting.close()

        with monkeypatch.context() as patch:
            patch.setattr(llama_engine.LlamaEngine, "_compute", compute_and_stop)
            with pytest.raises(StopError):
                context.run(lambda: smollm_llamacpp.generate(prompts, max_tokens=100))
    assert len(passes) == 3
    assert smollm_llamacpp.generate(prompts[:1], max_tokens=4)[0][0].text == before


@pytest.mark.model
def test_a_draft_is_cut_to_the_maximum_length(smollm_llamacpp):
    prompt = Prompt("Write a story about ships.")
    handle = smollm_llamacpp.read([prompt], SignalRequest(draft_tokens=9))[0].resume
    cut = smollm_llamacpp.generate([prompt], max_tokens=3, resume=[handle])[0][0]
    assert (cut.n_tokens, len(cut.tokens), cut.finished) == (3, 3, False)
    assert cut.text == smollm_llamacpp.generate([prompt], max_tokens=3)[0][0].text
