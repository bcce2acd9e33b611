import pytest

from knowgate.data.questions import describe_data, resolve_questions
from knowgate.errors import BadInput, BadSetting
from knowgate.types import Question


def test_questions_without_an_id_are_numbered_from_one():
    given = [Question("a?"), Question("b?", id="own"), Question("c?")]
    assert [one.id for one in resolve_questions(given)] == ["1", "own", "3"]


def test_a_limit_takes_the_first():
    assert [one.text for one in resolve_questions([Question("a?"), Question("b?")], limit=1)] == ["a?"]


def test_a_spec_is_loaded(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "a?"}\n')
    assert [one.text for one in resolve_questions(f"jsonl:{tmp_path}/q.jsonl")] == ["a?"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "the list of questions is empty"),
        ([Question(" ")], "question '1' is empty"),
        ([Question("a?", id="x"), Question("b?", id="x")], "the same id 'x'"),
        ([Question("a?", id="2"), Question("b?")], "the same id '2'"),
    ],
)
def test_invalid_lists_of_questions_are_rejected(given, message):
    with pytest.raises(BadInput, match=message):
        resolve_questions(given)


def test_a_limit_below_one_is_rejected():
    with pytest.raises(BadSetting, match="the limit is 0"):
        resolve_questions([Question("a?")], limit=0)


def test_data_is_described_by_its_spec():
    assert describe_data("jsonl:q.jsonl") == "jsonl:q.jsonl"
    assert describe_data([Question("a?")]) == "questions"


def test_a_text_is_not_accepted_as_a_question():
    with pytest.raises(BadInput, match=r"'Who\?', which is not a Question. Write Question\("):
        resolve_questions(["Who?"])


def test_a_bare_file_name_is_rejected_with_the_right_spec(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text("{}", encoding="utf-8")
    with pytest.raises(BadSetting, match=r"'mine.jsonl' is a file name without its format. Write jsonl:mine.jsonl"):
        resolve_questions("mine.jsonl")
