import pytest

from knowgate.gates.baselines import NeverGate
from knowgate.gates.rules.rule_set import load_rules
from knowgate.pipeline.answer_json import decision_record
from knowgate.pipeline.question_state import NOTE_TEXTS, QuestionState, describe_notes
from knowgate.pipeline.stages import apply_gate, apply_rules
from knowgate.types import Decision, DecisionNote, Question


def test_every_kind_of_note_has_words():
    assert all(describe_notes([note]) for note in DecisionNote)
    assert len({describe_notes([note])[0] for note in DecisionNote}) == len(DecisionNote)
    assert set(NOTE_TEXTS) == set(DecisionNote) - {DecisionNote.RETRIEVED_AGAIN}


def test_rounds_are_counted_and_said_once():
    notes = [DecisionNote.NOT_RERANKED, DecisionNote.RETRIEVED_AGAIN, DecisionNote.RETRIEVED_AGAIN]
    assert describe_notes(notes) == ["not reranked, the retriever is sure", "3 rounds of retrieval"]


class FarGate(NeverGate):
    """Gives every question the same need, and has the first one far from its training questions."""

    def __init__(self, need):
        self.need = need

    def score(self, questions, readings):
        return [self.need] * len(questions)

    def distances(self, questions, readings):
        return [1.6, *([0.4] * (len(questions) - 1))]


@pytest.mark.parametrize(("need", "noted"), [(0.1, True), (0.9, False)])
def test_a_skipped_question_unlike_the_training_questions_is_noted(need, noted):
    states = [QuestionState(Question(text)) for text in ("What is my thermostat's code?", "Who wrote Emma?")]
    apply_gate(FarGate(need), 0.5, states)
    far, near = (state.final_decision for state in states)
    assert (far.retrieve, far.notes) == (not noted, (DecisionNote.FAR_QUESTION,) if noted else ())
    assert ("unlike the questions that the gate was fitted on" in far.reason) == noted
    assert near.notes == ()


def test_a_rule_that_decides_drops_the_notes_about_the_gate():
    state = QuestionState(Question("Thanks!"))
    apply_gate(FarGate(0.1), 0.5, [state])
    apply_rules(load_rules(), [state])
    assert (state.final_decision.rule, state.final_decision.notes) == ("thanks", ())


def test_json_has_the_notes_as_a_list_of_plain_words():
    decision = Decision(True, 0.75, 0.5, "always", "why", notes=(DecisionNote.NOTHING_FOUND,))
    assert decision_record(decision)["notes"] == ["nothing found"]
    assert decision_record(Decision(True, 0.75, 0.5, "always", "why"))["notes"] == []
