import json

import pytest

from knowgate.data.questions import load_questions
from knowgate.errors import BadInput
from knowgate.types import Passage, Question

FULL = {
    "id": "q1",
    "question": "Who wrote Hamlet?",
    "answers": ["Shakespeare", 1599],
    "lang": "en",
    "choices": ["Shakespeare", "Goethe"],
    "contexts": [{"id": "p1", "title": "Hamlet", "text": "A play.", "is_gold": True}, {"text": "bare"}],
    "meta": {"hops": 2},
}


@pytest.fixture
def write(tmp_path):
    def make(*records):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return f"jsonl:{path}"

    return make


def test_every_field_of_a_record_is_parsed(write):
    assert load_questions(write(FULL)) == [
        Question(
            text="Who wrote Hamlet?",
            id="q1",
            answers=("Shakespeare", "1599"),
            lang="en",
            choices=("Shakespeare", "Goethe"),
            contexts=(Passage("p1", "A play.", "Hamlet"), Passage("1", "bare")),
            meta={"hops": 2},
        )
    ]


def test_a_question_without_id_gets_its_line_number(write):
    assert load_questions(write({"question": "a?"}, {"question": "b?", "id": None})) == [
        Question("a?", id="1"),
        Question("b?", id="2"),
    ]


def test_null_fields_are_ignored(write):
    record = dict.fromkeys(FULL) | {"question": "a?"}
    assert load_questions(write(record)) == [Question("a?", id="1")]


def test_a_limit_takes_the_first_ones(write):
    spec = write(*({"question": f"{i}?"} for i in range(5)))
    assert [question.text for question in load_questions(spec, limit=2)] == ["0?", "1?"]


def test_a_duplicate_id_is_rejected(write):
    with pytest.raises(BadInput, match="have the same id 'x'"):
        load_questions(write({"question": "a?", "id": "x"}, {"question": "b?", "id": "x"}))


def test_ids_are_compared_as_text(write):
    with pytest.raises(BadInput, match="have the same id '7'"):
        load_questions(write({"question": "a?", "id": 7}, {"question": "b?", "id": "7"}))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "the object has no field 'question'"),
        ({"question": "  "}, "'question' is empty"),
        ({"question": 3}, "question is 3, not a text"),
        ({"question": "a?", "answers": "Paris"}, "answers is 'Paris', not a list"),
        ({"question": "a?", "choices": {"A": "x"}}, "choices is {'A': 'x'}, not a list"),
        ({"question": "a?", "contexts": 3}, "contexts is 3, not a list"),
        ({"question": "a?", "contexts": ["text"]}, "contexts.0 is 'text', not an object"),
        ({"question": "a?", "contexts": [{"title": "x"}]}, "contexts.0 has no field 'text'"),
        ({"question": "a?", "lang": 1}, "lang is 1, not a text"),
        ({"question": "a?", "meta": ["x"]}, r"meta is \['x'\], not an object"),
    ],
)
def test_an_invalid_record_is_reported_with_its_line(write, record, message):
    with pytest.raises(BadInput, match=rf"data\.jsonl line 2: {message}"):
        load_questions(write({"question": "fine?"}, record))


def test_a_file_without_questions_is_rejected(write):
    with pytest.raises(BadInput, match="holds no questions"):
        load_questions(write())


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(BadInput, match=r"there is no file '.*none\.jsonl'"):
        load_questions(f"jsonl:{tmp_path / 'none.jsonl'}")
