"""What every backend must do: fake, replay, an OpenAI-compatible server, a chat interface of another framework and,
marked `model`, the embedded one."""

import threading

import httpx
import numpy as np
import pytest

from knowgate.core.http_client import RetryPolicy
from knowgate.errors import KnowgateError
from knowgate.integrations.chat_model import ChatModel
from knowgate.models.fake import FakeModel
from knowgate.models.openai.model import OpenAIModel
from knowgate.models.replay import RecordingModel, ReplayModel
from knowgate.types import LabelPrompt, Prompt, Signal, SignalRequest
from tests.support.chat_server import ChatServer

PROMPTS = [Prompt("What is the capital of France?"), Prompt("Hi"), Prompt("1 + 1 = ?")]
DRAFT = 2
TOKENS = 3


class RecordThenReplay:
    """Records each call and returns the replayed result."""

    def __init__(self, model, folder):
        self._recorder = RecordingModel(model, folder)
        self._folder = folder
        self._handles = {}
        self._recorder.fits([], 1)  # makes the folder

    def __getattr__(self, name):
        return getattr(ReplayModel(self._folder), name)

    def read(self, prompts, want):
        handles = [reading.resume for reading in self._recorder.read(prompts, want)]
        self._handles |= {handle.key: handle for handle in handles}
        return ReplayModel(self._folder).read(prompts, want)

    def generate(self, prompts, *, resume=None, **settings):
        inner = None if resume is None else [self._handles.get(getattr(item, "key", ""), item) for item in resume]
        self._recorder.generate(prompts, resume=inner, **settings)
        return ReplayModel(self._folder).generate(prompts, resume=resume, **settings)

    def stream(self, prompt, *, resume=None, **settings):
        inner = resume and self._handles.get(getattr(resume, "key", ""), resume)
        for _ in self._recorder.stream(prompt, resume=inner, **settings):
            pass
        return ReplayModel(self._folder).stream(prompt, resume=resume, **settings)

    def label_logits(self, prompts, labels):
        self._recorder.label_logits(prompts, labels)
        return ReplayModel(self._folder).label_logits(prompts, labels)

    def fits(self, prompts, max_tokens):
        self._recorder.fits(prompts, max_tokens)
        return ReplayModel(self._folder).fits(prompts, max_tokens)


def long_answers():
    return FakeModel({prompt.text: f"answer {i} has five words" for i, prompt in enumerate(PROMPTS)})


LOCAL = [pytest.param(name, marks=pytest.mark.model) for name in ("smollm", "smollm_llamacpp")]


class Chat(ChatModel):
    """A chat model of another framework, with the answers and log-probabilities of the fake model."""

    def __init__(self):
        super().__init__("chat", logprobs=True)
        self._inner = long_answers()

    def _complete(self, request):
        options = {"max_tokens": request.max_tokens, "temperature": request.temperature, "seed": request.seed}
        return self._inner.generate([Prompt(request.text)], **options)[0][0]


@pytest.fixture(params=["fake", "replay", "openai", "chat", *LOCAL])
def model(request, tmp_path):
    if "smollm" in request.param:
        return request.getfixturevalue(request.param)
    if request.param == "openai":
        quick = RetryPolicy(timeout=120, total=360, retries=1, backoff=0.0)
        return OpenAIModel("m", "http://server.test/v1", retry=quick, transport=httpx.MockTransport(ChatServer()))
    if request.param == "chat":
        return Chat()
    return long_answers() if request.param == "fake" else RecordThenReplay(long_answers(), tmp_path / "run")


def greedy(model, prompts):
    return [row[0].text for row in model.generate(prompts, max_tokens=TOKENS)]


known_answers = {}  # of a local model, by its name


@pytest.fixture
def answers(model):
    """The answers to all prompts; those of a local model are computed once."""
    if "smollm" not in model.name:
        return greedy(model, PROMPTS)
    if model.name not in known_answers:
        known_answers[model.name] = greedy(model, PROMPTS)
    return known_answers[model.name]


def test_answers_come_in_the_order_of_the_prompts(model, answers):
    assert greedy(model, PROMPTS[::-1]) == answers[::-1]


def test_a_batch_gives_the_same_answers_as_single_prompts(model, answers):
    assert answers == [greedy(model, [prompt])[0] for prompt in PROMPTS]


def test_a_batch_gives_the_same_drafts_as_single_prompts(model):
    want = SignalRequest(draft_tokens=DRAFT)
    singles = [model.read([prompt], want)[0].draft for prompt in PROMPTS]
    for draft, single in zip([reading.draft for reading in model.read(PROMPTS, want)], singles, strict=True):
        assert draft.text == single.text
        assert [t.logprob for t in draft.tokens] == pytest.approx([t.logprob for t in single.tokens], abs=1e-3)


def test_a_continued_draft_begins_with_the_draft(model):
    readings = model.read(PROMPTS, SignalRequest(draft_tokens=DRAFT))
    rows = model.generate(PROMPTS, max_tokens=TOKENS, resume=[reading.resume for reading in readings])
    for reading, row in zip(readings, rows, strict=True):
        assert len(row) == 1
        assert row[0].text.startswith(reading.draft.text)


def test_a_continued_draft_ends_like_a_whole_answer(model, answers):
    readings = model.read(PROMPTS, SignalRequest(draft_tokens=DRAFT))
    rows = model.generate(PROMPTS, max_tokens=TOKENS, resume=[reading.resume for reading in readings])
    assert [row[0].text for row in rows] == answers


def streamed(model, prompt, **settings):
    """Return the pieces of a stream and its completion."""
    stream, pieces = model.stream(prompt, max_tokens=TOKENS, **settings), []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


def test_a_stream_returns_what_generate_returns(model):
    for prompt in PROMPTS:
        pieces, completion = streamed(model, prompt)
        assert completion == model.generate([prompt], max_tokens=TOKENS)[0][0]
        assert "".join(pieces) == completion.text
        assert all(pieces)


def test_a_resumed_stream_begins_with_the_draft(model):
    for prompt, reading in zip(PROMPTS, model.read(PROMPTS, SignalRequest(draft_tokens=DRAFT)), strict=True):
        pieces, completion = streamed(model, prompt, resume=reading.resume)
        assert completion == model.generate([prompt], max_tokens=TOKENS, resume=[reading.resume])[0][0]
        assert "".join(pieces) == completion.text
        assert completion.text.startswith(reading.draft.text)


def test_a_stream_refuses_a_foreign_handle(model):
    with pytest.raises(KnowgateError):
        next(model.stream(PROMPTS[0], max_tokens=TOKENS, resume="not a handle"))


def test_the_thread_pool_has_the_size_of_the_concurrency(model):
    workers = model.workers
    used = [workers.submit(threading.get_ident) for _ in range(50)]
    assert 1 <= len({future.result() for future in used}) <= model.concurrency


def test_the_requested_number_of_samples_is_returned(model):
    drawn = model.generate(PROMPTS, max_tokens=TOKENS, temperature=1.0, n=3, seed=0)
    assert [len(row) for row in drawn] == [3, 3, 3]
    readings = model.read(PROMPTS[:1], SignalRequest(samples=2, sample_tokens=TOKENS, seed=0))
    assert len(readings[0].samples) == 2


def test_a_seed_gives_the_same_samples_again(model):
    settings = {"max_tokens": TOKENS, "temperature": 1.0, "n": 2, "seed": 5}
    assert model.generate(PROMPTS[:2], **settings) == model.generate(PROMPTS[:2], **settings)


def test_an_answer_respects_the_token_limit(model):
    readings = model.read(PROMPTS, SignalRequest(draft_tokens=1))
    assert all(len(reading.draft.tokens) <= 1 for reading in readings)


def test_no_prompts_give_no_results(model):
    assert model.read([], SignalRequest(draft_tokens=DRAFT)) == []
    assert model.generate([], max_tokens=TOKENS) == []
    assert model.fits([], TOKENS) == []


def test_signals_that_were_not_requested_are_absent(model):
    reading = model.read(PROMPTS[:1], SignalRequest(draft_tokens=1))[0]
    assert (reading.samples, dict(reading.hidden), dict(reading.labels)) == ((), {}, {})


def test_log_probabilities_are_returned_if_offered(model):
    drafts = [reading.draft for reading in model.read(PROMPTS, SignalRequest(draft_tokens=DRAFT))]
    offered = Signal.LOGPROBS in model.offers
    assert all((draft.tokens is not None) is offered for draft in drafts)
    assert all(token.logprob <= 0 for draft in drafts for token in draft.tokens or ())


def test_hidden_states_are_returned_if_offered_and_refused_otherwise(model):
    want = SignalRequest(draft_tokens=1, layers=(0, -1), after_draft=True)
    if Signal.HIDDEN not in model.offers:
        with pytest.raises(KnowgateError, match="hidden states"):
            model.read(PROMPTS, want)
        return
    for reading in model.read(PROMPTS, want):
        for states in (reading.hidden, reading.hidden_after):
            assert set(states) == {0, -1}
            assert all(state.ndim == 1 and state.dtype == np.float32 for state in states.values())


def test_label_logits_have_a_row_per_position_and_a_column_per_label(model):
    if Signal.LABELS not in model.offers:
        with pytest.raises(KnowgateError, match="cannot compute the probabilities of answers such as yes and no"):
            model.label_logits([LabelPrompt(("a",))], ["x"])
        return
    asked = [LabelPrompt((f"{prompt.text} Say Paris or Lyon.",), raw=False) for prompt in PROMPTS]
    logits = model.label_logits(asked, ["Paris", "Lyon"])
    assert [rows.shape for rows in logits] == [(1, 2)] * 3
    assert all(np.isfinite(rows).all() for rows in logits)


def test_fits_returns_a_result_per_prompt(model):
    fitting = model.fits(PROMPTS, TOKENS)
    assert fitting == [True, True, True]
    assert all(type(each) is bool for each in fitting)


def test_a_foreign_handle_is_refused(model):
    with pytest.raises(KnowgateError):
        model.generate(PROMPTS[:1], max_tokens=TOKENS, resume=["not a handle"])


def test_name_and_fingerprint_do_not_change(model):
    assert (model.name, model.fingerprint) == (model.name, model.fingerprint)
    assert model.name
    assert model.fingerprint
