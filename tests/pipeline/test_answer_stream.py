"""An answer while it is made: the same as the answer made at once, on every way a question can go."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import dataclass

import pytest

from knowgate.errors import BadInput, BadSetting
from knowgate.gates import load_gate
from knowgate.models.backend import Backend
from knowgate.models.fake import FakeModel
from knowgate.models.replay import RecordingModel, ReplayModel
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.types import AnswerEvent, Completion, DecisionEvent, Gate, Passage, PassagesEvent, TextEvent
from tests.support.retrieval_fakes import build_bm25

KNOWN, UNKNOWN, NOWHERE = "What is the capital of France?", "What is the badge colour of Anna?", "xyzzy?"
TABLE = {
    "capital of France": {"closed": "it is Paris of course", "logprob": math.log(0.9)},
    "badge colour of Anna": {"closed": "red or blue", "open": "it is green", "when": "badge", "logprob": math.log(0.2)},
}
PASSAGES = [
    Passage("badge", "The badge colour of Anna is green."),
    Passage("lunch", "Anna eats lunch at noon, the colour of soup varies."),
    Passage("france", "France is a country; its capital is Paris."),
]


@dataclass
class Judge:
    verdict: bool

    def are_useful(self, questions, passages):
        return [self.verdict for _ in questions]


@dataclass(frozen=True)
class SeveralRounds(Gate):
    """A gate that always retrieves, `rounds` times."""

    rounds: int

    def score(self, questions, readings):
        return [1.0 for _ in questions]

    def count_rounds(self, questions, readings):
        return [self.rounds for _ in questions]


class Chain:
    """Finds for each query what its longest known word leads to."""

    name = fingerprint = "chain"

    def __init__(self, **links):
        self.links = links

    def search(self, queries, k):
        return [[Passage(to, f"see {to}", score=1.0) for word, to in self.links.items() if word in q] for q in queries]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from knowgate.models.hf.model import HFModel
    from tests.support.byte_llama import save_byte_llama

    return HFModel(str(save_byte_llama(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture(params=["fake", "tiny"])
def model(request):
    return FakeModel(TABLE) if request.param == "fake" else request.getfixturevalue("tiny")


def build(model, gate="logprob:first", **settings):
    settings.setdefault("retriever", build_bm25(PASSAGES, stem=False))
    return AdaptiveRAG(model, load_gate(gate) if isinstance(gate, str) else gate, **settings)


def texts(events):
    return [event.text for event in events if isinstance(event, TextEvent)]


def kinds(events):
    """The kinds of events in order; pieces of text that follow each other are one."""
    names = [type(event).__name__.removesuffix("Event").lower() for event in events]
    return [name for last, name in zip(["", *names], names, strict=False) if (last, name) != ("text", "text")]


WAYS = {
    "skipping, going on from the draft": (KNOWN, {"threshold": 1.0}),
    "skipping without a draft": (KNOWN, {"gate": "never"}),
    "retrieving": (UNKNOWN, {"threshold": 0.0}),
    "retrieving without a reading": (UNKNOWN, {"gate": "always"}),
    "nothing is found": (NOWHERE, {"threshold": 0.0}),
    "a second look drops the passages": (UNKNOWN, {"threshold": 0.0, "second_look": Judge(False)}),
    "a second look keeps the passages": (UNKNOWN, {"threshold": 0.0, "second_look": Judge(True)}),
    "up to three rounds": (UNKNOWN, {"gate": SeveralRounds(3), "k": 1}),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_last_event_is_the_answer_and_its_text_is_what_was_streamed(model, way):
    question, settings = WAYS[way]
    rag = build(model, max_tokens=24, **settings)
    *before, last = rag.answer_stream(question)
    whole = rag.answer(question)
    for field in ("question", "text", "decision", "passages", "draft", "n_tokens"):
        assert getattr(last.answer, field) == getattr(whole, field)
    assert set(last.answer.seconds) == set(whole.seconds)
    assert "".join(texts(before)) == whole.text
    assert all(texts(before))


def test_a_skipped_question_gives_decision_text_and_answer(model):
    events = list(build(model, threshold=1.0).answer_stream(KNOWN))
    assert kinds(events) == ["decision", "text", "answer"]
    assert not events[0].decision.retrieve


def test_a_retrieved_question_gives_its_passages_before_the_text(model):
    events = list(build(model, "always").answer_stream(UNKNOWN))
    assert kinds(events) == ["decision", "passages", "text", "answer"]
    assert events[1] == PassagesEvent(events[-1].answer.passages)


def test_dropped_passages_are_announced_as_none(model):
    events = list(build(model, "always", second_look=Judge(False)).answer_stream(UNKNOWN))
    assert events[1] == PassagesEvent(())


def test_the_words_of_the_fake_model_come_one_by_one():
    assert texts(build(FakeModel(TABLE)).answer_stream(KNOWN)) == ["it", " is", " Paris", " of", " course"]


def test_a_local_models_text_comes_while_it_is_generated(tiny):
    passes = []
    hook = tiny.loaded.model.register_forward_hook(lambda *_: passes.append(1))
    try:
        events = build(tiny, "never", max_tokens=24).answer_stream(KNOWN)
        first = next(event for event in events if isinstance(event, TextEvent))
        seen = len(passes)
        assert first.text
        rest = list(events)
        assert seen < len(passes)
        assert len(texts(rest)) > 3
    finally:
        hook.remove()


def test_nothing_is_retrieved_before_the_decision_is_told():
    asked = []

    class Watched:
        name = fingerprint = "watched"

        def search(self, queries, k):
            asked.append(queries)
            return [[PASSAGES[0]] for _ in queries]

    events = build(FakeModel(TABLE), "always", retriever=Watched()).answer_stream(UNKNOWN)
    assert isinstance(next(events), DecisionEvent)
    assert asked == []
    assert isinstance(next(events), PassagesEvent)
    assert len(asked) == 1


# --- rounds ---------------------------------------------------------------------------------------

ANSWERS = {"one": "go to alpha", "second": "go to beta", "the third": "the end of it"}
CHAIN = Chain(start="one", alpha="second", beta="the third")


def rounds_model(answers=ANSWERS):
    """Shown the passage 'see one' it answers with the word that leads to the next: one -> second -> the third."""
    return FakeModel({f"see {word}": {"open": said, "when": f"see {word}"} for word, said in answers.items()})


def test_each_round_tells_its_passages_and_only_the_last_its_text():
    rag = build(rounds_model(), SeveralRounds(3), retriever=CHAIN, k=5)
    events = list(rag.answer_stream("start?"))
    shown = [[passage.id for passage in event.passages] for event in events if isinstance(event, PassagesEvent)]
    assert shown == [["one"], ["one", "second"], ["one", "second", "the third"]]
    assert kinds(events) == ["decision", "passages", "passages", "passages", "text", "answer"]
    assert texts(events) == ["the", " end", " of", " it"]
    assert events[-1].answer.decision == rag.answer("start?").decision


def test_where_a_round_finds_nothing_new_the_last_answer_comes_as_one_piece():
    rag = build(rounds_model(), SeveralRounds(3), retriever=Chain(start="one", alpha="second"), k=5)
    events = list(rag.answer_stream("start?"))
    assert kinds(events) == ["decision", "passages", "passages", "text", "answer"]
    assert texts(events) == ["go to beta"]


def test_where_the_answer_repeats_it_comes_as_one_piece():
    model = rounds_model({"one": "go to alpha", "second": "go to alpha"})
    events = list(build(model, SeveralRounds(3), retriever=CHAIN, k=5).answer_stream("start?"))
    assert texts(events) == ["go to alpha"]


# --- stopping early -------------------------------------------------------------------------------


def test_whoever_stops_listening_stops_the_model_and_frees_its_cache(tiny, monkeypatch):
    from knowgate.models.hf import model as hf_model

    streams, passes = [], []
    steps = hf_model.iter_greedy_steps
    monkeypatch.setattr(
        hf_model, "iter_greedy_steps", lambda batch, *rest: streams.append(weakref.ref(batch)) or steps(batch, *rest)
    )
    hook = tiny.loaded.model.register_forward_hook(lambda *_: passes.append(1))
    try:
        events = build(tiny, "never", max_tokens=200).answer_stream(KNOWN)
        next(event for event in events if isinstance(event, TextEvent))
        events.close()
        seen = len(passes)
        gc.collect()
        assert [stream() for stream in streams] == [None]
        assert seen == len(passes) < 100
    finally:
        hook.remove()


def test_closing_closes_the_models_own_stream():
    closed = []

    class Endless(Backend):
        name = fingerprint = "endless"
        offers, depth = frozenset(), 0

        def generate(self, prompts, **settings):
            raise AssertionError("a stream is not generated")

        def stream(self, prompt, *, max_tokens, resume=None):
            try:
                while True:
                    yield "more "
            finally:
                closed.append(True)
            return Completion("")

    events = build(Endless(), "never").answer_stream(KNOWN)
    assert [next(events) for _ in range(3)][1:] == [TextEvent("more ")] * 2
    events.close()
    assert closed == [True]


def test_the_time_of_the_listener_is_not_counted(monkeypatch):
    from knowgate.pipeline import question_state as clock

    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    events = []
    for event in build(FakeModel(TABLE)).answer_stream(KNOWN):
        events.append(event)
        now[0] += 100.0
    assert events[-1].answer.seconds["total"] == 0.0


# --- backends -------------------------------------------------------------------------------------


def test_a_backend_that_cannot_stream_gives_its_text_word_by_word():
    class Plain(Backend):
        name = fingerprint = "plain"
        offers, depth = frozenset(), 0

        def generate(self, prompts, *, max_tokens, temperature=0.0, n=1, seed=None, resume=None):
            return [[Completion("all of it", n_tokens=3)] for _ in prompts]

    assert texts(build(Plain(), "never").answer_stream(KNOWN)) == ["all", " of", " it"]


@pytest.mark.parametrize("question", [KNOWN, UNKNOWN])
def test_a_streamed_answer_is_recorded_like_a_plain_one(tmp_path, question):
    streamed, plain = tmp_path / "streamed", tmp_path / "plain"
    *_, last = build(RecordingModel(FakeModel(TABLE), streamed)).answer_stream(question)
    whole = build(RecordingModel(FakeModel(TABLE), plain)).answer(question)
    assert (streamed / "calls.jsonl").read_text() == (plain / "calls.jsonl").read_text()
    replayed = list(build(ReplayModel(streamed)).answer_stream(question))
    assert "".join(texts(replayed)) == last.answer.text == whole.text
    assert len(texts(replayed)) > 1


def test_a_stream_that_was_left_is_not_recorded(tmp_path):
    events = build(RecordingModel(FakeModel(TABLE), tmp_path), "never").answer_stream(KNOWN)
    next(event for event in events if isinstance(event, TextEvent))
    events.close()
    assert not (tmp_path / "calls.jsonl").exists()


# --- errors ---------------------------------------------------------------------------------------


def test_an_empty_question_is_refused():
    with pytest.raises(BadInput, match="the question is empty"):
        next(build(FakeModel(TABLE)).answer_stream(" "))


def test_what_goes_wrong_after_the_decision_comes_after_it():
    events = build(FakeModel(TABLE), "always", retriever=None).answer_stream(UNKNOWN)
    assert isinstance(next(events), DecisionEvent)
    with pytest.raises(BadSetting, match="no documents to retrieve from"):
        next(events)


def test_the_answer_is_the_last_event():
    assert isinstance(list(build(FakeModel(TABLE)).answer_stream(KNOWN))[-1], AnswerEvent)
