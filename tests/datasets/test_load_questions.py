import gzip
import json
import os

import pytest

from knowgate.datasets import DATASETS, load_questions
from knowgate.errors import BadInput, BadSetting, UnknownName
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


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A benchmark folder with nq/test and nq/train."""
    (tmp_path / "nq").mkdir()
    for split in ("test", "train"):
        with gzip.open(tmp_path / "nq" / f"{split}.jsonl.gz", "wt") as file:
            file.write(json.dumps({"id": split, "question": f"from {split}?"}) + "\n")
    monkeypatch.setenv("KNOWGATE_BENCH", str(tmp_path))
    return tmp_path


# --- jsonl ----------------------------------------------------------------------------------------


def test_every_field_of_a_record_is_taken(write):
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


def test_a_question_alone_will_do_and_has_its_line_number_as_id(write):
    assert load_questions(write({"question": "a?"}, {"question": "b?", "id": None})) == [
        Question("a?", id="1"),
        Question("b?", id="2"),
    ]


def test_fields_that_are_null_are_left_out(write):
    record = dict.fromkeys(FULL) | {"question": "a?"}
    assert load_questions(write(record)) == [Question("a?", id="1")]


def test_a_limit_takes_the_first_ones(write):
    spec = write(*({"question": f"{i}?"} for i in range(5)))
    assert [question.text for question in load_questions(spec, limit=2)] == ["0?", "1?"]


def test_an_id_that_comes_twice_is_named(write):
    with pytest.raises(BadInput, match="holds the id 'x' twice"):
        load_questions(write({"question": "a?", "id": "x"}, {"question": "b?", "id": "x"}))


def test_ids_are_compared_as_text(write):
    with pytest.raises(BadInput, match="holds the id '7' twice"):
        load_questions(write({"question": "a?", "id": 7}, {"question": "b?", "id": "7"}))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "'question' is missing or empty"),
        ({"question": "  "}, "'question' is missing or empty"),
        ({"question": 3}, "'question' is missing or empty"),
        ({"question": "a?", "answers": "Paris"}, "'answers' must be a list, not 'Paris'"),
        ({"question": "a?", "choices": {"A": "x"}}, "'choices' must be a list"),
        ({"question": "a?", "contexts": 3}, "'contexts' must be a list, not 3"),
        ({"question": "a?", "contexts": ["text"]}, "each of 'contexts' must be an object with a 'text'"),
        ({"question": "a?", "contexts": [{"title": "x"}]}, "each of 'contexts' must be an object with a 'text'"),
        ({"question": "a?", "lang": 1}, "'lang' must be a text, not 1"),
        ({"question": "a?", "meta": ["x"]}, "'meta' must be an object"),
    ],
)
def test_a_wrong_record_is_named_by_its_line(write, record, message):
    with pytest.raises(BadInput, match=rf"data\.jsonl line 2: {message}"):
        load_questions(write({"question": "fine?"}, record))


def test_a_file_without_questions_is_refused(write):
    with pytest.raises(BadInput, match="holds no questions"):
        load_questions(write())


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"there is no file '.*none\.jsonl'"):
        load_questions(f"jsonl:{tmp_path / 'none.jsonl'}")


def test_a_source_without_a_value_says_what_it_needs():
    with pytest.raises(BadSetting, match="data source 'jsonl' needs a value: jsonl:FILE"):
        load_questions("jsonl")


def test_an_unknown_source_is_answered_with_the_known_ones():
    with pytest.raises(UnknownName, match=rf"unknown data source 'csv'\. Known: {', '.join(sorted(DATASETS))}"):
        load_questions("csv:x")


# --- bench ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("bench")
def test_a_benchmark_is_read_from_its_split():
    assert [question.text for question in load_questions("bench:nq/test")] == ["from test?"]


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bench:nqq/test", "unknown benchmark 'nqq'. Did you mean 'nq'.* Known: nq"),
        ("bench:nq/tst", "unknown split of 'nq' 'tst'. Did you mean 'test'.* Known: test, train"),
        ("bench:nq", "unknown split of 'nq' ''.* Known: test, train"),
    ],
)
def test_a_misspelt_benchmark_or_split_is_answered_with_the_known_ones(spec, message):
    with pytest.raises(UnknownName, match=message):
        load_questions(spec)


def test_without_the_variable_the_error_names_it(monkeypatch):
    monkeypatch.delenv("KNOWGATE_BENCH", raising=False)
    with pytest.raises(BadSetting, match="KNOWGATE_BENCH"):
        load_questions("bench:nq/test")


def test_a_variable_that_names_no_folder_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("KNOWGATE_BENCH", str(tmp_path / "none"))
    with pytest.raises(BadInput, match=r"KNOWGATE_BENCH names '.*none', which is not a folder"):
        load_questions("bench:nq/test")


@pytest.mark.bench
@pytest.mark.skipif("KNOWGATE_BENCH" not in os.environ, reason="KNOWGATE_BENCH is not set")
@pytest.mark.parametrize(
    ("spec", "first", "gold"),
    [("bench:nq_open/test", "who got the first nobel prize in physics", "Wilhelm Conrad Röntgen")],
)
def test_the_real_benchmark_begins_as_published(spec, first, gold):
    question = load_questions(spec, limit=1)[0]
    assert (question.text, question.answers) == (first, (gold,))
