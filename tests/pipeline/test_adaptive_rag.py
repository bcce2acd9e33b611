import asyncio
import math
from dataclasses import dataclass

import pytest

from knowgate.errors import BadInput, BadSetting, ModelError, UnsupportedSignal
from knowgate.gates import load_gate
from knowgate.gates.baselines import AlwaysGate
from knowgate.models import load_model
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts, fit_passages
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.types import Completion, DecisionNote, Gate, Passage, Question, Signal, SignalRequest
from tests.support.counting import CountingModel
from tests.support.retrieval_fakes import build_bm25

KNOWN, UNKNOWN = "capital of France", "badge colour of Anna"
TABLE = {
    KNOWN: {"closed": "it is Paris of course", "logprob": math.log(0.9)},
    UNKNOWN: {"closed": "red", "open": "green", "logprob": math.log(0.2)},
}
PASSAGES = [
    Passage("badge", "The badge colour of Anna is green."),
    Passage("lunch", "Anna eats lunch at noon, the colour of soup varies."),
    Passage("france", "France is a country; its capital is Paris."),
]
QUESTION_KNOWN = f"What is the {KNOWN}?"
QUESTION_UNKNOWN = f"What is the {UNKNOWN}?"


class Searching:
    """A retriever that remembers what it was asked."""

    name = fingerprint = "searching"

    def __init__(self, passages=PASSAGES):
        self._inner = build_bm25(passages, stem=False)
        self.asked = []

    def search(self, queries, k):
        self.asked.append((list(queries), k))
        return self._inner.search(queries, k)


class Shortest:
    """A reranker: the shorter, the better."""

    name = "shortest"

    def score(self, questions, passages):
        return [[-float(len(passage.text)) for passage in found] for found in passages]


@dataclass
class Judge:
    """A second look with a fixed verdict."""

    verdict: bool

    def are_useful(self, questions, passages):
        return [self.verdict for _ in questions]


class SmallWindow(FakeModel):
    """Sees so many characters only."""

    def __init__(self, table, window):
        super().__init__(table)
        self._window = window

    def fits(self, prompts, max_tokens):
        return [len(prompt.text) <= self._window for prompt in prompts]


def build(gate="logprob:first", model=None, **settings):
    settings.setdefault("retriever", Searching())
    return AdaptiveRAG(model or FakeModel(TABLE), load_gate(gate), **settings)


# --- skipping -------------------------------------------------------------------------------------


def test_a_known_question_is_answered_without_retrieving():
    retriever = Searching()
    answer = build(retriever=retriever).answer(QUESTION_KNOWN)
    assert (answer.text, answer.passages, answer.decision.retrieve) == ("it is Paris of course", (), False)
    assert retriever.asked == []


def test_a_skipped_question_continues_from_the_gates_own_pass():
    model = CountingModel(FakeModel(TABLE))
    readings, resumed = [], []
    inner_read, inner_generate = model.read, model.generate
    model.read = lambda prompts, want: readings.extend(inner_read(prompts, want)) or list(readings)
    model.generate = lambda prompts, **settings: resumed.append(settings) or inner_generate(prompts, **settings)
    assert build(model=model).answer(QUESTION_KNOWN).text == "it is Paris of course"
    assert model.calls == [("read", 1), ("generate", 1)]
    assert resumed[0]["resume"] == [readings[0].resume]  # the handle of the reading: no second prefill
    assert readings[0].draft.text == "it"  # which had one token only


def test_only_the_tokens_the_gate_asked_for_are_read():
    wants = []
    model = FakeModel(TABLE)
    read = model.read
    model.read = lambda prompts, want: wants.append(want) or read(prompts, want)
    build(model=model).answer(QUESTION_KNOWN)
    assert wants == [SignalRequest(draft_tokens=1)]


def test_a_gate_that_reads_nothing_costs_no_pass():
    model = CountingModel(FakeModel(TABLE))
    assert build("never", model).answer(QUESTION_UNKNOWN).text == "red"
    assert model.calls == [("generate", 1)]


def test_the_never_gate_needs_no_retriever():
    assert build("never", retriever=None).answer(QUESTION_KNOWN).text == "it is Paris of course"


# --- retrieving -----------------------------------------------------------------------------------


def test_an_unknown_question_is_answered_from_its_passages():
    answer = build().answer(QUESTION_UNKNOWN)
    assert answer.text == "green"
    assert answer.decision.retrieve
    assert answer.decision.need == pytest.approx(0.8)
    assert answer.passages[0].id == "badge"


def test_as_many_passages_are_fetched_as_are_shown():
    retriever = Searching()
    answer = build("always", retriever=retriever, k=1).answer(QUESTION_UNKNOWN)
    assert retriever.asked == [([QUESTION_UNKNOWN], 1)]
    assert [passage.id for passage in answer.passages] == ["badge"]


def test_the_passages_stand_in_the_prompt_in_their_order():
    prompts = []
    model = FakeModel(TABLE)
    generate = model.generate
    model.generate = lambda given, **settings: prompts.extend(given) or generate(given, **settings)
    answer = build("always", model, k=2).answer(QUESTION_UNKNOWN)
    assert [prompt.text for prompt in prompts] == [
        AnswerPrompts().open(Question(QUESTION_UNKNOWN), answer.passages).text
    ]


def test_a_reranker_gets_twenty_candidates_and_its_order_is_used():
    many = [Passage(str(i), "Anna " + "x" * i) for i in range(30, 0, -1)]
    retriever = Searching(many)
    answer = build("always", retriever=retriever, reranker=Shortest(), k=2).answer("Who is Anna?")
    assert retriever.asked == [(["Who is Anna?"], 20)]
    candidates = retriever.search(["Who is Anna?"], 20)[0]
    expected = sorted(candidates, key=lambda passage: len(passage.text))[:2]
    assert [passage.id for passage in answer.passages] == [passage.id for passage in expected]
    assert answer.passages[0].score == -len(answer.passages[0].text)


def test_what_the_retriever_is_sure_of_is_noted_as_not_reranked():
    answer = build("always", reranker=Shortest(), rerank_margin=0.0).answer(QUESTION_UNKNOWN)
    assert answer.decision.notes == (DecisionNote.NOT_RERANKED,)
    assert answer.decision.reason.endswith("; not reranked, the retriever is sure")
    assert build("always", reranker=Shortest()).answer(QUESTION_UNKNOWN).decision.notes == ()


def test_a_second_look_that_finds_the_passages_useless_drops_them():
    answer = build("always", second_look=Judge(False)).answer(QUESTION_UNKNOWN)
    assert (answer.text, answer.passages) == ("red", ())
    assert answer.decision.retrieve  # it was decided, and paid for
    assert answer.decision.reason == "the gate 'always' retrieves for every question; the passages were judged useless"
    assert answer.decision.notes == (DecisionNote.PASSAGES_USELESS,)


def test_a_second_look_that_finds_them_useful_keeps_them():
    assert build("always", second_look=Judge(True)).answer(QUESTION_UNKNOWN).text == "green"


def test_where_nothing_is_found_the_answer_is_closed_book_and_says_so():
    answer = build("always").answer("xyzzy?")
    assert answer.passages == ()
    assert answer.decision.reason == "the gate 'always' retrieves for every question; nothing was found"
    assert answer.decision.notes == (DecisionNote.NOTHING_FOUND,)
    assert answer.text == build("never").answer("xyzzy?").text


def test_a_dropped_retrieval_continues_from_the_gates_own_pass():
    model = CountingModel(FakeModel(TABLE))
    build(model=model, second_look=Judge(False)).answer(QUESTION_UNKNOWN)
    assert model.calls == [("read", 1), ("generate", 1)]


def test_deciding_to_retrieve_without_a_retriever_is_a_clear_error():
    with pytest.raises(BadSetting, match="there are no documents to retrieve from"):
        build("always", retriever=None).answer(QUESTION_UNKNOWN)


# --- the context window ---------------------------------------------------------------------------


def open_size(passages, question=QUESTION_UNKNOWN):
    return len(AnswerPrompts().open(Question(question), passages).text)


def test_passages_that_do_not_fit_are_cut_from_the_end():
    found = Searching().search([QUESTION_UNKNOWN], 3)[0]
    assert [passage.id for passage in found] == ["badge", "lunch"]
    model = SmallWindow(TABLE, open_size(found[:1]))
    assert build("always", model).answer(QUESTION_UNKNOWN).passages == tuple(found[:1])


def test_the_last_passage_left_is_halved_until_it_fits():
    passage = Passage("p", "0123456789abcdef", "Title")
    model = SmallWindow(TABLE, open_size([Passage("p", "0123", "Title")]))
    (kept,) = fit_passages(model, AnswerPrompts(), Question(QUESTION_UNKNOWN), [passage, passage], 8)
    assert (kept.id, kept.title, kept.text) == ("p", "Title", "0123")


def test_where_no_passage_fits_at_all_the_answer_is_closed_book_and_says_so():
    answer = build("always", SmallWindow(TABLE, 0)).answer(QUESTION_UNKNOWN)
    assert (answer.text, answer.passages) == ("red", ())
    assert answer.decision.reason.endswith("; no passage fits the context window")
    assert answer.decision.notes == (DecisionNote.NO_PASSAGE_FITS,)


# --- decisions ------------------------------------------------------------------------------------


def test_the_reason_gives_need_threshold_and_the_gates_words():
    assert build().decide(QUESTION_UNKNOWN).reason == (
        "the LLM may not know (need 80 %, threshold 50 %): the first word of its draft was 20 % certain"
    )
    assert build().decide(QUESTION_KNOWN).reason.startswith("the LLM probably knows (need 10 %, threshold 50 %): ")


@pytest.mark.parametrize(
    ("threshold", "said"),
    [
        (0.1001, "the LLM probably knows (need 10.00 %, threshold 10.01 %)"),
        (0.0999, "the LLM may not know (need 10.00 %, threshold 9.99 %)"),
        (0.2, "the LLM probably knows (need 10 %, threshold 20 %)"),
    ],
)
def test_numbers_that_look_the_same_are_told_apart_by_more_digits(threshold, said):
    assert build(threshold=threshold).decide(QUESTION_KNOWN).reason.startswith(said)


def test_a_gates_note_stands_behind_its_own_words():
    class NotedGate(Gate):
        note = "fitted elsewhere"

        def score(self, questions, readings):
            return [1.0 for _ in questions]

    class WordyGate(NotedGate):
        def explain(self, questions, readings):
            return ["a feeling" for _ in questions]

    reasons = [AdaptiveRAG(FakeModel(), gate).decide("Who?").reason for gate in (NotedGate(), WordyGate())]
    assert reasons == [
        "the LLM may not know (need 100 %, threshold 50 %): fitted elsewhere",
        "the LLM may not know (need 100 %, threshold 50 %): a feeling; fitted elsewhere",
    ]


@pytest.mark.parametrize(("threshold", "retrieves"), [(0.79, True), (0.81, False)])
def test_the_users_threshold_replaces_the_gates(threshold, retrieves):
    decision = build(threshold=threshold).decide(QUESTION_UNKNOWN)
    assert (decision.retrieve, decision.threshold) == (retrieves, threshold)


def test_a_need_that_equals_the_threshold_does_not_retrieve():
    need = build().decide(QUESTION_UNKNOWN).need
    assert not build(threshold=need).decide(QUESTION_UNKNOWN).retrieve


def test_the_gate_always_retrieves_at_the_highest_threshold():
    assert build("always", threshold=1.0).decide(QUESTION_UNKNOWN).retrieve


def test_deciding_retrieves_nothing_and_generates_nothing():
    model, retriever = CountingModel(FakeModel(TABLE)), Searching()
    build(model=model, retriever=retriever).decide_many([QUESTION_KNOWN, QUESTION_UNKNOWN])
    assert (model.calls, retriever.asked) == ([("read", 2)], [])


def test_a_gate_that_asks_reads_labels_before_the_answer():
    model = CountingModel(FakeModel({**TABLE, "badge": {"known": False, "closed": "red", "open": "green"}}))
    assert build("prompt", model).answer("What badge?").text == "green"
    assert model.calls == [("label_logits", 1), ("fits", 1), ("generate", 1)]


def test_a_gate_the_backend_cannot_serve_is_refused_before_anything_is_asked():
    model = CountingModel(FakeModel(TABLE, offers=frozenset({Signal.DRAFT})))
    with pytest.raises(UnsupportedSignal, match="gate 'logprob' needs logprobs"):
        build(model=model).answer(QUESTION_KNOWN)
    assert model.calls == []


# --- batches --------------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_questions_whatever_was_decided():
    questions = [QUESTION_UNKNOWN, QUESTION_KNOWN, "xyzzy?", QUESTION_KNOWN, QUESTION_UNKNOWN]
    answers = build().answer_many(questions)
    assert [answer.question.text for answer in answers] == questions
    assert [answer.text for answer in answers] == [build().answer(question).text for question in questions]
    assert [answer.decision.retrieve for answer in answers][:2] == [True, False]


def test_a_batch_is_read_once_and_generated_once_a_way():
    model = CountingModel(FakeModel(TABLE))
    build(model=model).answer_many([QUESTION_UNKNOWN, QUESTION_KNOWN] * 3)
    generated = [call for call in model.calls if call[0] != "fits"]
    assert generated == [("read", 6), ("generate", 3), ("generate", 3)]


def test_long_inputs_give_answers_a_batch_at_a_time():
    model = CountingModel(FakeModel(TABLE))
    stream = build("never", model).stream(iter([QUESTION_KNOWN] * 5), batch=2)
    next(stream)
    assert model.calls == [("generate", 2)]
    assert len(list(stream)) == 4
    assert model.calls == [("generate", 2), ("generate", 2), ("generate", 1)]


def test_no_questions_give_no_answers():
    assert build().answer_many([]) == []
    assert build().decide_many([]) == []


@pytest.mark.parametrize("question", ["", " \n\t", Question("  ")])
def test_an_empty_question_is_refused(question):
    with pytest.raises(BadInput, match="the question is empty"):
        build().answer(question)


def test_a_question_with_choices_is_put_as_one():
    prompts = []
    model = FakeModel(TABLE)
    generate = model.generate
    model.generate = lambda given, **settings: prompts.extend(given) or generate(given, **settings)
    build("never", model).answer(Question("Which?", choices=("x", "y")))
    assert "multiple choice" in prompts[0].text
    assert "A. x\nB. y" in prompts[0].text


# --- settings and times ---------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [-0.01, 1.01, math.nan])
def test_a_threshold_outside_0_to_1_is_refused(threshold):
    with pytest.raises(BadSetting, match=r"the threshold is .* between 0 and 1"):
        build(threshold=threshold)


@pytest.mark.parametrize("threshold", [0, 1])
def test_the_ends_are_allowed_as_thresholds(threshold):
    assert build(threshold=threshold).threshold == threshold


@pytest.mark.parametrize("setting", [{"k": 0}, {"max_tokens": 0}])
def test_settings_below_one_are_refused(setting):
    with pytest.raises(BadSetting, match="must be at least 1"):
        build(**setting)


def test_a_skipped_question_has_the_times_of_its_stages():
    assert set(build().answer(QUESTION_KNOWN).seconds) == {"read", "gate", "answer", "total"}


def test_a_retrieved_question_has_the_times_of_its_stages():
    seconds = build(reranker=Shortest(), second_look=Judge(True)).answer(QUESTION_UNKNOWN).seconds
    assert set(seconds) == {"read", "gate", "retrieve", "rerank", "second look", "fit", "answer", "arbiter", "total"}
    assert seconds["total"] == pytest.approx(sum(seconds.values()) / 2)
    assert all(value >= 0 for value in seconds.values())


# --- what is no part of a pipeline ----------------------------------------------------------------


def test_specs_in_the_place_of_things_are_refused_with_what_makes_them():
    model, gate = load_model("fake"), load_gate("never")
    with pytest.raises(BadSetting, match=r"model='fake' is a text, not an object. Load it first: load_model\('fake'\)"):
        AdaptiveRAG("fake", gate)
    with pytest.raises(BadSetting, match="gate='logprob:mean' is not a gate"):
        AdaptiveRAG(model, "logprob:mean")
    with pytest.raises(BadSetting, match="retriever='index' is a text"):
        AdaptiveRAG(model, gate, "index")


def test_what_is_no_question_is_refused():
    rag = AdaptiveRAG(load_model("fake"), load_gate("never"))
    with pytest.raises(BadInput, match="a question must be a text or a Question, got 3"):
        rag.answer(3)
    with pytest.raises(BadInput, match="questions must be a list"):
        rag.answer_many("Who?")
    with pytest.raises(BadInput, match="questions must be a list"):
        rag.decide_many("Who?")
    with pytest.raises(BadInput, match="questions must be a list"):
        asyncio.run(rag.aanswer_many("Who?"))


@dataclass(frozen=True)
class Careless(Gate):
    """A gate of somebody else: says what it was told to."""

    needs_given: object = (0.5,)
    reasons: tuple[str, ...] = ("",)

    def score(self, questions, readings):
        return self.needs_given

    def explain(self, questions, readings):
        return list(self.reasons)


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        (Careless([]), "gate 'careless' returned 0 scores for 1 questions"),
        (Careless([0.1, 0.2]), "returned 2 scores for 1 questions"),
        (Careless(None), "did not return a list of numbers"),
        (Careless([None]), "did not return a list of numbers"),
        (Careless(reasons=("a", "b")), "returned 2 explanations for 1 questions"),
    ],
)
def test_a_careless_gate_is_named(gate, said):
    with pytest.raises(ModelError, match=said):
        AdaptiveRAG(load_model("fake"), gate).decide("Who?")


def test_a_copy_with_the_same_gate_does_not_bind_it_again():
    models = []

    class BoundGate(AlwaysGate):
        def bind(self, model, prompts):
            models.append(model)
            return self

    first, second = FakeModel(TABLE), FakeModel(TABLE)
    rag = AdaptiveRAG(first, BoundGate())
    copies = [rag, rag.replace(rules=None, threshold=0.5), rag.replace(model=second)]
    assert [copy.bound_gate for copy in copies] == [rag.gate] * 3
    assert models == [first, first, second]  # the second copy was made before the gate was bound
    assert rag.replace(rules=None).bound_gate is rag.bound_gate
    assert models == [first, first, second]


class NonsenseModel(FakeModel):
    """A model that answers nonsense, and whose tokens are words."""

    def generate(self, prompts, **options):
        return [[Completion("Nonsense", n_tokens=1)] for _ in prompts]

    def tokenize(self, text):
        return list(range(len(text.split())))


@pytest.mark.parametrize(("max_tokens", "text"), [(5, "Nonsense"), (6, "The zebra quota is 17 percent."), (32, None)])
def test_a_quotation_keeps_a_small_token_limit(max_tokens, text):
    sentence = "The zebra quota is 17 percent."
    long_sentence = "The zebra quota is 17 percent" + " or so" * 20 + "."

    class OneRetriever:
        name = fingerprint = "one"

        def search(self, queries, k):
            return [[Passage("1", sentence if text is not None else long_sentence)] for _ in queries]

    options = {"prompts": AnswerPrompts(max_sentences=1), "max_tokens": max_tokens, "rules": None}
    rag = AdaptiveRAG(NonsenseModel(), load_gate("always"), OneRetriever(), **options)
    answer = rag.answer("What is the zebra quota?")
    assert answer.text == (text or long_sentence)
