from knowgate.pipeline.answer_json import decision_record
from knowgate.pipeline.question_state import NOTE_TEXTS, describe_notes
from knowgate.types import Decision, DecisionNote


def test_every_kind_of_note_has_words():
    assert all(describe_notes([note]) for note in DecisionNote)
    assert len({describe_notes([note])[0] for note in DecisionNote}) == len(DecisionNote)
    assert set(NOTE_TEXTS) == set(DecisionNote) - {DecisionNote.RETRIEVED_AGAIN}


def test_rounds_are_counted_and_said_once():
    notes = [DecisionNote.NOT_RERANKED, DecisionNote.RETRIEVED_AGAIN, DecisionNote.RETRIEVED_AGAIN]
    assert describe_notes(notes) == ["not reranked, the retriever is sure", "3 rounds of retrieval"]


def test_json_has_the_notes_as_a_list_of_plain_words():
    decision = Decision(True, 0.75, 0.5, "always", "why", notes=(DecisionNote.NOTHING_FOUND,))
    assert decision_record(decision)["notes"] == ["nothing found"]
    assert decision_record(Decision(True, 0.75, 0.5, "always", "why"))["notes"] == []
