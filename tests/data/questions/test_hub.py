"""Hugging Face data sets, read from a local folder: what is loaded by name goes the same way."""

from __future__ import annotations

import json

import pytest

from knowgate.data.questions import load_questions
from knowgate.errors import BadInput, BadSetting

pytest.importorskip("datasets")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "set"
    source.mkdir()
    rows = [
        {"q": "Who wrote Hamlet?", "answer": {"aliases": ["Shakespeare"]}},
        {"q": "Why?", "answer": {"aliases": []}},
    ]
    (source / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return source


def test_nested_columns_are_read_by_path(folder):
    first, second = load_questions(f"hub:{folder}?question=q&answers=answer.aliases")
    assert (first.text, first.answers, first.id) == ("Who wrote Hamlet?", ("Shakespeare",), "test-1")
    assert second.answers == ()


def test_an_unknown_option_error_lists_the_known_ones(folder):
    with pytest.raises(BadSetting, match=r"'hub:' has no option 'column'\. Known options: split, config"):
        load_questions(f"hub:{folder}?column=q")


def test_a_missing_split_is_reported(folder):
    with pytest.raises(BadInput, match=r"cannot load the data set hub:.*split nothing"):
        load_questions(f"hub:{folder}?split=nothing&question=q")
