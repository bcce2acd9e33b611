import gzip
import json
import os

import pytest

from knowgate.data.questions import load_questions
from knowgate.errors import BadInput, BadSetting, UnknownName


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A benchmark folder with nq/test and nq/train."""
    (tmp_path / "nq").mkdir()
    for split in ("test", "train"):
        with gzip.open(tmp_path / "nq" / f"{split}.jsonl.gz", "wt") as file:
            file.write(json.dumps({"id": split, "question": f"from {split}?"}) + "\n")
    monkeypatch.setenv("KNOWGATE_BENCH", str(tmp_path))
    return tmp_path


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
def test_an_unknown_benchmark_or_split_error_lists_the_known_ones(spec, message):
    with pytest.raises(UnknownName, match=message):
        load_questions(spec)


def test_without_the_variable_the_error_names_it(monkeypatch):
    monkeypatch.delenv("KNOWGATE_BENCH", raising=False)
    with pytest.raises(BadSetting, match="KNOWGATE_BENCH"):
        load_questions("bench:nq/test")


def test_a_variable_that_names_no_folder_is_rejected(monkeypatch, tmp_path):
    monkeypatch.setenv("KNOWGATE_BENCH", str(tmp_path / "none"))
    with pytest.raises(BadInput, match=r"KNOWGATE_BENCH='.*none' is not a folder"):
        load_questions("bench:nq/test")


@pytest.mark.bench
@pytest.mark.skipif("KNOWGATE_BENCH" not in os.environ, reason="KNOWGATE_BENCH is not set")
@pytest.mark.parametrize(
    ("spec", "first", "gold"),
    [("bench:nq_open/test", "who got the first nobel prize in physics", "Wilhelm Conrad Röntgen")],
)
def test_the_benchmark_has_the_published_questions(spec, first, gold):
    question = load_questions(spec, limit=1)[0]
    assert (question.text, question.answers) == (first, (gold,))
