"""Texts that a line has beside its question."""

from knowgate.data.questions import load_questions
from knowgate.data.questions.records import read_extra_fields


def test_extra_texts_of_a_line_are_returned_by_question_id(tmp_path):
    file = tmp_path / "asked.jsonl"
    lines = ['{"question": "A?", "lang": "en", "answer": "a", "n": 3}', '{"question": "B?", "id": 7, "answer": "b"}']
    file.write_text("\n".join(lines), encoding="utf-8")
    assert read_extra_fields(f"jsonl:{file}") == {"1": {"answer": "a"}, "7": {"answer": "b"}}
    assert [question.meta for question in load_questions(f"jsonl:{file}")] == [{}, {}]


def test_other_sources_have_no_extra_fields():
    assert read_extra_fields("bench:triviaqa/test") == {}
