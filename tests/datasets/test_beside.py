"""Texts that a line has beside its question."""

from knowgate.datasets import load_questions, texts_beside


def test_texts_at_the_top_of_a_line_are_found_by_the_questions_id_and_the_formats_own_keys_are_not(tmp_path):
    file = tmp_path / "asked.jsonl"
    lines = ['{"question": "A?", "lang": "en", "answer": "a", "n": 3}', '{"question": "B?", "id": 7, "answer": "b"}']
    file.write_text("\n".join(lines), encoding="utf-8")
    assert texts_beside(f"jsonl:{file}") == {"1": {"answer": "a"}, "7": {"answer": "b"}}
    assert [question.meta for question in load_questions(f"jsonl:{file}")] == [{}, {}]


def test_sources_that_are_no_jsonl_file_have_none():
    assert texts_beside("bench:triviaqa/test") == {}
