"""Questions from plain text, and what is meant by the name of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from knowgate.data.questions import guess_data_spec, load_questions
from knowgate.errors import BadInput


def test_each_line_is_a_question_with_its_number_as_id(tmp_path: Path):
    file = tmp_path / "q.txt"
    file.write_text("\ufeffWho?\n\n  What is it?  \n", encoding="utf-8")
    assert [(one.id, one.text, one.answers) for one in load_questions(f"lines:{file}")] == [
        ("1", "Who?", ()),
        ("3", "What is it?", ()),
    ]


def test_a_line_that_is_not_utf8_is_reported(tmp_path: Path):
    (tmp_path / "q.txt").write_bytes(b"Who?\n\xff\xfe?\n")
    with pytest.raises(BadInput, match=r"line 2 is not UTF-8"):
        load_questions(f"lines:{tmp_path / 'q.txt'}")


def test_a_missing_file_is_reported():
    with pytest.raises(BadInput, match=r"there is no file .gone\.txt."):
        load_questions("lines:gone.txt")


@pytest.mark.parametrize(
    ("name", "spec"), [("a.jsonl", "jsonl:a.jsonl"), ("a.jsonl.gz", "jsonl:a.jsonl.gz"), ("a.txt", "lines:a.txt")]
)
def test_a_file_is_read_by_its_suffix(name: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()
    assert guess_data_spec(name) == spec


def test_a_spec_is_unchanged_and_an_unknown_file_is_rejected():
    assert guess_data_spec("hub:squad?split=test") == "hub:squad?split=test"
    with pytest.raises(BadInput, match="there is no file 'nothing' with questions"):
        guess_data_spec("nothing")
