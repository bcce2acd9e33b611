import json
import logging

import numpy as np
import pytest

from knowgate.data.runs.folder import RunFolder
from knowgate.data.signals.confidence import SELF_ASSESSMENT
from knowgate.errors import BadSetting
from knowgate.labels.labeling import label
from knowgate.models import load_model
from knowgate.models.hf.model import HFModel
from knowgate.retrieval import load_retriever
from knowgate.retrieval.index import build_index
from knowgate.types import Passage, Question
from tests.support.invented import write_invented
from tests.support.tiny_models import save_word_llama


@pytest.fixture
def made(tmp_path):
    return write_invented(tmp_path / "in", 6)


def test_a_data_spec_and_a_model_spec_make_a_run(made, tmp_path):
    run = label(made.data, model=made.model, out=tmp_path / "run", samples=2)
    assert isinstance(run, RunFolder)
    assert [row.closed.correct for row in run.rows()] == [True, False] * 3
    assert run.settings()["data"] == made.data
    assert run.settings()["layers"] == [2, 3, 4]


def test_questions_model_and_retriever_can_be_objects(made, tmp_path):
    build_index(made.docs, tmp_path / "index")
    retriever = load_retriever(str(tmp_path / "index"))
    run = label(made.questions, model=load_model(made.model), index=retriever, out=tmp_path / "run", samples=0)
    rows = list(run.rows())
    assert all(row.open is not None and row.open.correct for row in rows)
    assert [row.id for row in rows] == [question.id for question in made.questions]
    assert run.settings()["data"] == "questions"


def test_without_an_index_the_contexts_of_the_questions_are_used(made, tmp_path):
    town = made.questions[1].answers[0]
    question = Question(made.questions[1].text, answers=(town,), contexts=(Passage("p", f"It is {town}."),))
    (row,) = label([question], model=made.model, out=str(tmp_path / "run"), samples=0).rows()
    assert (row.closed.correct, row.open.correct) == (False, True)


def test_a_second_grader_stores_its_verdicts_beside_the_first(made, tmp_path):
    town = made.questions[1].answers[0]
    question = Question(made.questions[1].text, answers=(f"in {town}",), contexts=(Passage("p", f"It is {town}."),))
    run = label([question], model=made.model, out=tmp_path / "run", samples=2, grade="contains,exact")
    (row,) = run.rows()
    assert row.grader == "contains"
    assert (row.closed.other_grades, row.open.other_grades) == ({"exact": False}, {"exact": False})
    assert run.settings()["second_grader"] == "exact"


def test_a_tie_of_yes_and_no_is_a_self_assessment_of_a_local_model_but_not_of_a_server(made, tmp_path, monkeypatch):
    def tied(model, prompts, labels):
        return [np.zeros((1, 2), dtype=np.float32) for _ in prompts]

    local, server = HFModel(str(save_word_llama(tmp_path))), load_model(made.model)
    for model in (local, server):
        monkeypatch.setattr(type(model), "label_logits", tied)
    runs = [
        label(made.questions[:2], model=model, out=tmp_path / name, samples=0, closed_book=True)
        for name, model in (("local", local), ("server", server))
    ]
    assert [[row.signals.get(SELF_ASSESSMENT) for row in run.rows()] for run in runs] == [[0.0, 0.0], [None, None]]


def test_the_same_call_continues_an_interrupted_run(made, tmp_path):
    def stop(progress):
        if progress.done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        label(made.data, model=made.model, out=tmp_path / "run", samples=0, on_progress=stop)
    assert len(list(RunFolder(tmp_path / "run").rows())) == 4
    seen = []
    run = label(made.data, model=made.model, out=tmp_path / "run", samples=0, on_progress=seen.append)
    assert len(list(run.rows())) == 6
    assert (seen[0].done, seen[-1].done, seen[-1].fresh) == (4, 6, 2)


def test_other_questions_are_rejected_in_the_same_folder(made, tmp_path):
    label(made.questions[:2], model=made.model, out=tmp_path / "run", samples=0)
    with pytest.raises(BadSetting, match="started with other settings"):
        label(made.questions[2:], model=made.model, out=tmp_path / "run", samples=0)


def test_failed_questions_are_labeled_again_on_request(made, tmp_path, caplog):
    run = label(made.data, model=made.model, out=tmp_path / "run", samples=0)
    rows = run.path / "labels.jsonl"
    first, *others = rows.read_text().splitlines(keepends=True)
    rows.write_text(json.dumps({**json.loads(first), "error": "timeout"}) + "\n" + "".join(others))
    with caplog.at_level(logging.INFO, logger="knowgate"):
        label(made.data, model=made.model, out=tmp_path / "run", samples=0, retry_failed=True)
    assert [row.error for row in run.rows()] == [None] * 6
    assert "labeling 1 failed questions again" in caplog.messages


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": -1}, "samples=-1 is not allowed: it must be at least 0"),
        ({"max_tokens": 0}, "max_tokens=0 is not allowed"),
        ({"k": 0}, "k=0 is not allowed"),
        ({"temperature": 0.0}, "must be above 0 for sampling"),
        ({"top_p": 0.0}, "top_p=0"),
        ({"top_k": -3}, "top_k=-3"),
        ({"judge_prompt": "guess"}, "it must be 'implies' or 'contains'"),
        ({"lang": "fr"}, "unknown language 'fr'"),
    ],
)
def test_invalid_options_are_rejected_before_anything_is_written(made, tmp_path, options, message):
    with pytest.raises(BadSetting, match=message):
        label(made.data, model=made.model, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
