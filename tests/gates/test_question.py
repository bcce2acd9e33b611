"""The gate that reads the question alone: fitted on rows where its type decides."""

from dataclasses import replace

import numpy as np
import pytest

from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.data.runs.table import LabelTable
from knowgate.data.splits import split_questions
from knowgate.errors import ArtifactError, BrokenIndex
from knowgate.gates import load_fitted_gate
from knowgate.gates.artifacts.gate_folder import read_artifact
from knowgate.gates.question import QuestionGate
from knowgate.retrieval.index import build_index
from knowgate.training.examples import Examples
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.question import fit_question
from knowgate.types import Question, Reading

SETTINGS = {"model": "fake", "model_fingerprint": "f", "prompts_fingerprint": "p", "grader": "contains",
            "data_fingerprint": "d"}  # fmt: skip


def make_examples(texts, known):
    questions = [Question(text, id=str(i), answers=("x",)) for i, text in enumerate(texts)]
    rows = [
        LabelRow(question.id, question.text, "en", closed=GradedAnswer("x", correct=is_known))
        for question, is_known in zip(questions, known, strict=True)
    ]
    table = LabelTable(rows, [Reading()] * len(rows), SETTINGS, ["run"])
    return Examples(table, ~np.array(known), "known", split_questions(texts, 0))


@pytest.fixture(scope="module")
def by_type():
    texts = [f"{'Who' if i % 2 else 'When'} was thing {i}?" for i in range(160)]
    return make_examples(texts, [bool(i % 2) for i in range(160)])


def test_it_learns_which_types_of_questions_are_known(by_type, tmp_path):
    save_fitted(fit_question(by_type), by_type, tmp_path / "gate")
    gate = load_fitted_gate(str(tmp_path / "gate"))
    who, when = gate.score([Question("Who is it?"), Question("When was it?")], [Reading(), Reading()])
    assert who < 0.5 < when
    assert gate.explain([Question("When?")], [Reading()]) == ["question type: when"]
    assert (gate.needs, gate.request.is_empty) == (frozenset(), True)


def test_with_an_index_rare_words_count_and_the_index_is_not_needed_later(tmp_path):
    (tmp_path / "docs").mkdir()
    for number in range(3):
        (tmp_path / "docs" / f"{number}.txt").write_text("what is " + " ".join(f"w{i}" for i in range(1, 160, 2)))
    build_index(tmp_path / "docs", tmp_path / "index", kind="bm25")
    examples = make_examples([f"what is w{i}" for i in range(160)], [bool(i % 2) for i in range(160)])
    save_fitted(fit_question(examples, index=str(tmp_path / "index")), examples, tmp_path / "gate")
    for file in sorted((tmp_path / "index").rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    gate = load_fitted_gate(str(tmp_path / "gate"))
    frequent, rare = gate.score([Question("what is w1"), Question("what is new")], [Reading()] * 2)
    assert frequent < rare


def test_a_folder_without_an_index_is_an_error(by_type, tmp_path):
    with pytest.raises(BrokenIndex, match=r"the file index\.json is missing"):
        fit_question(by_type, index=str(tmp_path / "nothing"))


def test_a_classifier_of_another_width_is_rejected(by_type, tmp_path):
    result = fit_question(by_type)
    save_fitted(result, by_type, tmp_path / "gate")
    artifact = read_artifact(tmp_path / "gate")
    narrow = {name: block[..., :2] if name in ("mean", "scale") else block for name, block in artifact.tensors.items()}
    with pytest.raises(ArtifactError, match="shape"):
        QuestionGate.from_artifact(replace(artifact, tensors=narrow))
