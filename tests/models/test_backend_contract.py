"""What every backend must do: fake, replay, an OpenAI-compatible server, a chat interface of another framework and,
marked `model`, the embedded one."""

import threading

import httpx
import numpy as np
import pytest

from knowgate.errors import KnowgateError
from knowgate.integrations.chat_model import ChatModel
from knowgate.models.fake import FakeModel
from knowgate.models.openai.client import RetryPolicy
from knowgate.models.openai.model import OpenAIModel
from knowgate.models.replay import RecordingModel, ReplayModel
from knowgate.types import LabelPrompt, Prompt, Signal, SignalRequest
from tests.support.chat_server import ChatServer

PROMPTS = [Prompt("What is the capital of France?"), Prompt("Hi"), Prompt("1 + 1 = ?")]
DRAFT = 2
TOKENS = 3


class RecordThenReplay:
    """Records each call on the way; what is given back has gone through the files."""

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
    """Another framework's chat interface with log-probabilities; the answers are the fake model's."""

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


def test_answers_come_in_the_order_of_the_prompts(model):
    assert greedy(model, PROMPTS[::-1]) == greedy(model, PROMPTS)[::-1]


def test_a_batch_gives_what_its_prompts_give_one_by_one(model):
    assert greedy(model, PROMPTS) == [greedy(model, [prompt])[0] for prompt in PROMPTS]


def test_the_drafts_of_a_batch_are_those_of_its_prompts_one_by_one(model):
    want = SignalRequest(draft_tokens=DRAFT)
    singles = [model.read([prompt], want)[0].draft for prompt in PROMPTS]
    for draft, single in zip([reading.draft for reading in model.read(PROMPTS, want)], singles, strict=True):
        assert draft.text == single.text
        assert [t.logprob for t in draft.tokens] == pytest.approx([t.logprob for t in single.tokens], abs=1e-3)


def test_going_on_from_a_draft_gives_the_draft_and_more(model):
    readings = model.read(PROMPTS, SignalRequest(draft_tokens=DRAFT))
    rows = model.generate(PROMPTS, max_tokens=TOKENS, resume=[reading.resume for reading in readings])
    for reading, row in zip(readings, rows, strict=True):
        assert len(row) == 1
        assert row[0].text.startswith(reading.draft.text)


def test_going_on_from_a_draft_ends_where_a_whole_answer_ends(model):
    readings = model.read(PROMPTS, SignalRequest(draft_tokens=DRAFT))
    rows = model.generate(PROMPTS, max_tokens=TOKENS, resume=[reading.resume for reading in readings])
    assert [row[0].text for row in rows] == greedy(model, PROMPTS)


def streamed(model, prompt, **settings):
    """The pieces of a stream and the completion at its end."""
    stream, pieces = model.stream(prompt, max_tokens=TOKENS, **settings), []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


def test_a_stream_ends_in_what_is_generated_at_once(model):
    for prompt in PROMPTS:
        pieces, completion = streamed(model, prompt)
        assert completion == model.generate([prompt], max_tokens=TOKENS)[0][0]
        assert "".join(pieces) == completion.text
        assert all(pieces)


def test_a_stream_that_goes_on_from_a_draft_begins_with_it(model):
    for prompt, reading in zip(PROMPTS, model.read(PROMPTS, SignalRequest(draft_tokens=DRAFT)), strict=True):
        pieces, completion = streamed(model, prompt, resume=reading.resume)
        assert completion == model.generate([prompt], max_tokens=TOKENS, resume=[reading.resume])[0][0]
        assert "".join(pieces) == completion.text
        assert completion.text.startswith(reading.draft.text)


def test_a_stream_refuses_a_handle_of_something_else(model):
    with pytest.raises(KnowgateError):
        next(model.stream(PROMPTS[0], max_tokens=TOKENS, resume="not a handle"))


def test_a_model_has_no_more_threads_than_may_use_it_at_once(model):
    workers = model.workers
    used = [workers.submit(threading.get_ident) for _ in range(50)]
    assert 1 <= len({future.result() for future in used}) <= model.concurrency


def test_as_many_samples_are_given_as_were_asked_for(model):
    drawn = model.generate(PROMPTS, max_tokens=TOKENS, temperature=1.0, n=3, seed=0)
    assert [len(row) for row in drawn] == [3, 3, 3]
    readings = model.read(PROMPTS[:1], SignalRequest(samples=2, sample_tokens=TOKENS, seed=0))
    assert len(readings[0].samples) == 2


def test_a_seed_gives_the_same_samples_again(model):
    settings = {"max_tokens": TOKENS, "temperature": 1.0, "n": 3, "seed": 5}
    assert model.generate(PROMPTS, **settings) == model.generate(PROMPTS, **settings)


def test_an_answer_has_no_more_tokens_than_it_may(model):
    readings = model.read(PROMPTS, SignalRequest(draft_tokens=1))
    assert all(len(reading.draft.tokens) <= 1 for reading in readings)


def test_no_prompts_give_no_results(model):
    assert model.read([], SignalRequest(draft_tokens=DRAFT)) == []
    assert model.generate([], max_tokens=TOKENS) == []
    assert model.fits([], TOKENS) == []


def test_what_was_not_wanted_is_not_given(model):
    reading = model.read(PROMPTS[:1], SignalRequest(draft_tokens=1))[0]
    assert (reading.samples, dict(reading.hidden), dict(reading.labels)) == ((), {}, {})


def test_log_probabilities_come_where_they_are_offered(model):
    drafts = [reading.draft for reading in model.read(PROMPTS, SignalRequest(draft_tokens=DRAFT))]
    offered = Signal.LOGPROBS in model.offers
    assert all((draft.tokens is not None) is offered for draft in drafts)
    assert all(token.logprob <= 0 for draft in drafts for token in draft.tokens or ())


def test_hidden_states_come_where_they_are_offered_and_are_refused_elsewhere(model):
    want = SignalRequest(draft_tokens=1, layers=(0, -1), after_draft=True)
    if Signal.HIDDEN not in model.offers:
        with pytest.raises(KnowgateError, match="hidden states"):
            model.read(PROMPTS, want)
        return
    for reading in model.read(PROMPTS, want):
        for states in (reading.hidden, reading.hidden_after):
            assert set(states) == {0, -1}
            assert all(state.ndim == 1 and state.dtype == np.float32 for state in states.values())


def test_labels_come_where_they_are_offered_one_row_a_position_one_column_a_label(model):
    if Signal.LABELS not in model.offers:
        with pytest.raises(KnowgateError, match="without label logits"):
            model.label_logits([LabelPrompt(("a",))], ["x"])
        return
    asked = [LabelPrompt((f"{prompt.text} Say Paris or Lyon.",), raw=False) for prompt in PROMPTS]
    logits = model.label_logits(asked, ["Paris", "Lyon"])
    assert [rows.shape for rows in logits] == [(1, 2)] * 3
    assert all(np.isfinite(rows).all() for rows in logits)


def test_each_prompt_is_told_whether_it_fits(model):
    fitting = model.fits(PROMPTS, TOKENS)
    assert fitting == [True, True, True]
    assert all(type(each) is bool for each in fitting)


def test_a_handle_of_something_else_is_refused(model):
    with pytest.raises(KnowgateError):
        model.generate(PROMPTS[:1], max_tokens=TOKENS, resume=["not a handle"])


def test_name_and_fingerprint_do_not_change(model):
    assert (model.name, model.fingerprint) == (model.name, model.fingerprint)
    assert model.name
    assert model.fingerprint
