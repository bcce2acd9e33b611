"""Fields that a record has beside its question."""

import json

import pytest

from knowgate.data.questions import load_questions
from knowgate.data.questions.files import read_extra_fields, read_scores


def test_extra_fields_of_a_line_are_returned_by_question_id(tmp_path):
    file = tmp_path / "asked.jsonl"
    lines = ['{"question": "A?", "lang": "en", "answer": "a", "n": 3}', '{"question": "B?", "id": 7, "answer": "b"}']
    file.write_text("\n".join(lines), encoding="utf-8")
    assert read_extra_fields(f"jsonl:{file}") == {"1": {"answer": "a", "n": 3}, "7": {"answer": "b"}}
    assert [question.meta for question in load_questions(f"jsonl:{file}")] == [{}, {}]


def test_other_sources_have_no_extra_fields():
    assert read_extra_fields("bench:triviaqa/test") == {}


@pytest.mark.parametrize(
    "record",
    [
        {"scores": [{"name": "ok", "value": 0}, {"name": "ok", "value": 1, "dataType": "BOOLEAN"}]},  # Langfuse
        {"scores": {"ok": [0, 1]}},
        {"feedback_stats": {"ok": {"n": 1, "avg": 1}}},  # LangSmith
        {"feedback": [{"key": "ok", "score": 1}]},
        {"annotations": json.dumps([{"name": "ok", "result": {"score": 1, "label": "good"}}])},  # Phoenix
    ],
)
def test_scores_of_each_tool_are_collected_by_name(record):
    assert read_scores(record) == {"ok": 1}


def test_a_thumb_is_read_as_text_where_no_number_is_recorded():
    assert read_scores({"annotations": [{"name": "user", "result": {"score": None, "label": "thumbs_down"}}]}) == {
        "user": "thumbs_down"
    }


def test_the_records_of_an_export_are_returned_with_their_scores(tmp_path):
    file = tmp_path / "traces.jsonl"
    file.write_text(json.dumps({"id": "t", "input": "Who?", "latency": 2, "scores": [{"name": "ok", "value": 1}]}))
    fields = read_extra_fields(f"langfuse:{file}")
    assert (fields["t"]["latency"], fields["t"]["scores"]) == (2, {"ok": 1})
