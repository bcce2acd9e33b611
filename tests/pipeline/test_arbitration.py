"""After retrieval an arbiter chooses: at once and while it is streamed, with what is said about it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from knowgate.data.history.entries import KnowledgeLabel
from knowgate.data.signals.confidence import is_empty_draft
from knowgate.errors import ArtifactError, BadSetting, UnsupportedSignal
from knowgate.gates import load_gate
from knowgate.gates.arbiters import load_arbiter
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.models.fake import FakeModel
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import answer_record
from knowgate.pipeline.builder import build_arbiter
from knowgate.pipeline.settings import PipelineOptions
from knowgate.pipeline.traffic_log import label_by_agreement
from knowgate.training.arbiter import fit_arbiter
from knowgate.types import Completion, DecisionNote, Gate, Passage, Signal, TextEvent, Token
from tests.support.pairs_by_hand import Prefers, pair_run
from tests.support.retrieval_fakes import build_bm25

LOST, FOUND, SAME = "Who wrote the lost book?", "What colour is the badge?", "What is the capital of France?"
TABLE = {
    "lost book": {"closed": "it was memory", "open": "not mentioned in the passages", "when": "shelf", "logprob": -2.0},
    "badge": {"closed": "memory says red", "open": "it is green", "when": "pinned", "logprob": -2.0},
    "France": {"closed": "Paris", "open": "paris", "when": "city", "logprob": math.log(0.3)},
}
PASSAGES = [
    Passage("lost", "The lost book: shelf two."),
    Passage("badge", "The badge pinned is green."),
    Passage("f", "France: city of Paris."),
]
SEARCH = build_bm25(PASSAGES, stem=False)


def build(gate="logprob:mean", **options):
    options.setdefault("threshold", 0.1)
    return AdaptiveRAG(FakeModel(TABLE), load_gate(gate), SEARCH, **options)


def streamed(rag, question):
    return "".join(event.text for event in rag.answer_stream(question) if isinstance(event, TextEvent))


# --- rules, on by default -------------------------------------------------------------------------


def test_an_answer_that_abstains_gives_way_to_the_draft():
    answer = build().answer(LOST)
    assert (answer.text, answer.open_text) == ("it was memory", "not mentioned in the passages")
    assert answer.choice.is_closed_book
    assert DecisionNote.DRAFT_GIVEN in answer.decision.notes
    assert "the arbiter rules gives the answer from memory: the answer with passages says it cannot tell" in (
        answer.decision.reason
    )


def test_other_answers_are_as_they_were_and_nothing_is_said():
    answer = build().answer(FOUND)
    assert (answer.text, answer.choice.is_closed_book) == ("it is green", False)
    assert "arbiter" not in answer.decision.reason


def test_they_stay_out_where_the_gate_reads_no_whole_draft():
    model = FakeModel({"lost book": {**TABLE["lost book"], "closed": "it was a long memory"}})
    rag = AdaptiveRAG(model, load_gate("logprob:first"), SEARCH, threshold=0.1)
    answer = rag.answer(LOST)
    assert (answer.text, answer.choice) == ("not mentioned in the passages", None)


def test_they_can_be_told_to_have_drafts_made():
    rag = build("logprob:first", arbiter=load_arbiter("rules:make_drafts=true"))
    assert rag.answer(LOST).text == "it was memory"


def test_they_can_be_switched_off():
    assert build(arbiter=None).answer(LOST).text == "not mentioned in the passages"
    assert build_arbiter(PipelineOptions(arbiter="none")) is None
    assert build_arbiter(PipelineOptions()) is RULES_ARBITER


def test_a_skipped_question_is_not_arbitrated():
    assert build(threshold=0.99).answer(LOST).choice is None


# --- empty drafts and answers ---------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["", " ", "\n"])
def test_an_empty_draft_means_to_retrieve(draft):
    rag = build_sure(draft, "it is green")
    assert rag.decide(FOUND).need == 1.0
    answer = rag.answer(FOUND)
    assert (answer.text, answer.choice) == ("it is green", None)
    assert answer.decision.reason == (
        "the LLM may not know (need 100 %, threshold 50 %): its answer without passages is empty"
    )
    assert streamed(rag, FOUND) == "it is green"


def test_an_empty_draft_does_not_count_for_a_gate_that_reads_none():
    rag = build_sure("", "it is green").replace(gate=load_gate("never"), threshold=None)
    assert not rag.decide(FOUND).retrieve


def test_one_token_of_white_space_can_be_the_beginning_of_an_answer():
    assert not is_empty_draft(Completion("\n", finished=False, n_tokens=1))
    assert is_empty_draft(Completion("\n", finished=True, n_tokens=1))
    assert is_empty_draft(Completion("", finished=False, n_tokens=20))  # a reasoning model at its token limit


@pytest.mark.parametrize("open_book", ["", "\n"])
def test_an_empty_answer_with_passages_gives_way_to_the_draft(open_book):
    rag = build_sure("red", open_book, logprob=-2.0).replace(arbiter=Prefers(word="nothing"))
    assert rag.answer(FOUND).text == "red"
    assert streamed(rag, FOUND) == "red"


def build_sure(closed, open_book, logprob=-0.001):
    entry = {"closed": closed, "open": open_book, "when": "pinned", "logprob": logprob}
    return AdaptiveRAG(SureModel({"badge": entry}), load_gate("logprob:mean"), SEARCH, threshold=0.5)


class SureModel(FakeModel):
    """A fake model whose empty drafts have a token that it is sure of, such as the end of the answer."""

    def read(self, prompts, request):
        end = (Token("<end>", -0.001),)
        readings = super().read(prompts, request)
        return [
            replace(reading, draft=replace(reading.draft, tokens=end))
            if reading.draft and reading.draft.is_empty
            else reading
            for reading in readings
        ]


# --- any arbiter ----------------------------------------------------------------------------------


def test_the_answer_believed_more_is_given_at_once_and_streamed():
    rag = build(arbiter=Prefers("memory"))
    assert rag.answer(FOUND).text == streamed(rag, FOUND) == "memory says red"


def test_the_answer_with_passages_is_streamed_where_it_is_chosen():
    rag = build(arbiter=Prefers("green"))
    assert rag.answer(FOUND).text == streamed(rag, FOUND) == "it is green"


def test_a_batch_is_arbitrated_together_and_equal_answers_cost_nothing():
    asked: list[str] = []
    answers = build(arbiter=Prefers("memory", asked)).answer_many([LOST, FOUND, SAME])
    assert [answer.text for answer in answers] == ["it was memory", "memory says red", "paris"]
    assert asked == [LOST, FOUND]


def test_drafts_are_made_for_it_where_the_gate_reads_none():
    assert build("always", arbiter=Prefers("memory")).answer(FOUND).text == "memory says red"


def test_deciding_alone_makes_no_drafts_for_it():
    rag = build("always", arbiter=Prefers("memory"))
    read = []
    rag.model.read = lambda prompts, want: read.append(want) or []
    assert rag.decide(FOUND).retrieve
    assert read == []


def test_what_cannot_abstain_any_more_is_heard_while_it_is_made():
    words = "it is green and it was so for years and will be so for years to come as all who saw it say again and again"
    table = {"badge": {**TABLE["badge"], "open": words}}
    rag = AdaptiveRAG(FakeModel(table), load_gate("logprob:mean"), SEARCH, threshold=0.1, max_tokens=64)
    pieces = [event.text for event in rag.answer_stream(FOUND) if isinstance(event, TextEvent)]
    assert len(pieces[0]) >= 80
    assert len(pieces) > 1
    assert "".join(pieces) == rag.answer(FOUND).text == words


@dataclass(frozen=True)
class SeveralRounds(Gate):
    """A gate that always retrieves, up to three times."""

    needs = frozenset({Signal.DRAFT})

    def score(self, questions, readings):
        return [1.0 for _ in questions]

    def count_rounds(self, questions, readings):
        return [3 for _ in questions]


@pytest.mark.parametrize(("word", "text"), [("memory", "memory says red"), ("green", "it is green")])
def test_the_answer_of_the_last_round_is_arbitrated_and_nothing_is_shown_before(word, text):
    rag = AdaptiveRAG(FakeModel(TABLE), SeveralRounds(), SEARCH, arbiter=Prefers(word))
    assert rag.answer(FOUND).text == streamed(rag, FOUND) == text


def test_the_json_of_an_answer_says_which_was_given_and_why():
    rag = build(arbiter=Prefers("memory"))
    record = answer_record(rag.answer(FOUND), rag)
    assert record["answer"] == record["draft"] == "memory says red"
    assert record["choice"]["given"] == "draft"
    assert record["choice"]["open_answer"] == "it is green"
    assert record["choice"]["believed"] == {"draft": 1.0, "passages": 0.0}


def test_a_question_whose_draft_was_given_is_not_logged_as_known():
    rag = build(arbiter=Prefers("memory"))
    assert label_by_agreement(rag.answer(FOUND), rag.max_tokens) is KnowledgeLabel.UNKNOWN


# --- what does not fit ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Reads(Prefers):
    """Needs what the fake model does not give."""

    needs = frozenset({Signal.HIDDEN, Signal.LABELS, Signal.LOGPROBS})


def test_an_arbiter_that_needs_what_the_llm_does_not_give_is_refused():
    model = FakeModel(TABLE, offers=frozenset({Signal.DRAFT}))
    rag = AdaptiveRAG(model, load_gate("always"), SEARCH, arbiter=Reads())
    with pytest.raises(
        UnsupportedSignal, match="does not return hidden, labels, logprobs, which arbiter 'prefers' needs"
    ):
        rag.answer(FOUND)


def test_an_arbiter_of_another_llm_is_refused(tmp_path):
    fitted = fit_arbiter(pair_run(tmp_path / "run"), out=tmp_path / "arbiter")
    with pytest.raises(ArtifactError, match="was fitted on fake"):
        build(arbiter=fitted).answer(FOUND)


def test_a_text_is_no_arbiter():
    with pytest.raises(BadSetting, match=r"load_arbiter\('rules'\)"):
        build(arbiter="rules")
