from knowgate.pipeline.answer_json import decision_record
from knowgate.pipeline.notes import WORDS, in_words
from knowgate.types import Decision, Note


def test_every_kind_of_note_has_words():
    assert all(in_words([note]) for note in Note)
    assert len({in_words([note])[0] for note in Note}) == len(Note)
    assert set(WORDS) == set(Note) - {Note.RETRIEVED_AGAIN}


def test_rounds_are_counted_and_said_once():
    notes = [Note.NOT_RERANKED, Note.RETRIEVED_AGAIN, Note.RETRIEVED_AGAIN]
    assert in_words(notes) == ["not reranked, the retriever is sure", "3 rounds of retrieval"]


def test_json_has_the_notes_as_a_list_of_plain_words():
    decision = Decision(True, 0.75, 0.5, "always", "why", notes=(Note.NOTHING_FOUND,))
    assert decision_record(decision)["notes"] == ["nothing found"]
    assert decision_record(Decision(True, 0.75, 0.5, "always", "why"))["notes"] == []
