from dataclasses import replace

import numpy as np
import pytest

from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.data.runs.table import LabelTable
from knowgate.data.splits import split_questions
from knowgate.errors import BadInput, BadSetting
from knowgate.gates import load_fitted_gate
from knowgate.training.adaptive import fit_adaptive, label_cheapest_strategy
from knowgate.training.examples import Examples
from knowgate.training.gate_artifact import save_fitted
from knowgate.types import Question, Reading
from tests.support.hash_embedder import HashEmbedder

RULES = {"easy": (True, True), "single": (False, True), "chained": (False, False)}  # word -> closed, open right


def row(closed, opened, iterative=None, **meta):
    sides = {
        "closed": GradedAnswer("x", correct=closed),
        "open": None if opened is None else GradedAnswer("x", correct=opened),
        "iterative": None if iterative is None else GradedAnswer("x", correct=iterative),
    }
    return LabelRow("id", "q", "en", meta=meta, **sides)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (row(True, False), "no"),
        (row(False, True), "one"),
        (row(False, False), "multi"),
        (row(False, False, acc_contains={"ircot": True}), "multi"),
        (row(False, False, acc_contains={"ircot": False}), None),
        (row(False, True, acc_contains={"ircot": True}), "one"),
        (row(True, None), "no"),
        (row(False, False, iterative=True), "multi"),
        (row(False, False, iterative=False), None),
        (row(False, True, iterative=False), "one"),
    ],
)
def test_the_label_is_the_cheapest_strategy_that_was_right(made, expected):
    assert label_cheapest_strategy(made) == expected


def test_a_row_without_an_open_book_answer_is_refused():
    with pytest.raises(BadSetting, match="Label again with `index`"):
        label_cheapest_strategy(row(False, None))


def examples(words=("easy", "single", "chained"), n=240):
    texts = [f"{words[i % len(words)]} question number {i}" for i in range(n)]
    rows = [replace(row(*RULES[words[i % len(words)]]), question=text) for i, text in enumerate(texts)]
    needed = np.array([not made.closed.correct for made in rows])
    settings = {"model": "m", "model_fingerprint": "m", "prompts_fingerprint": "p", "grader": "g",
                "data_fingerprint": "d"}  # fmt: skip
    trial = LabelTable(rows, [Reading()] * n, settings, ["run"])
    return Examples(trial, needed, "known", split_questions(texts, 0))


def test_it_learns_a_planted_rule_and_comes_back_from_disk_the_same(tmp_path):
    data = examples()
    fitted = fit_adaptive(data, embedder=HashEmbedder())
    manifest = save_fitted(fitted, data, tmp_path / "adaptive")
    assert manifest["metrics"]["auroc"]["value"] > 0.95
    cls = type(load_fitted_gate(str(tmp_path / "adaptive")))
    gates = [cls(load_fitted_gate(str(tmp_path / "adaptive")).artifact, embedder=HashEmbedder()) for _ in range(2)]
    asked = [Question("an easy one"), Question("a single one"), Question("a chained one")]
    needs = [gate.score(asked, [Reading()] * 3) for gate in gates]
    assert needs[0] == needs[1]
    assert needs[0][0] < 0.5 < min(needs[0][1:])
    assert gates[0].count_rounds(asked[1:], [Reading()] * 2) == [1, 3]
    test = [data.questions[place] for place in data.split.test]
    raw = gates[0].raw(test, [Reading()] * len(test))
    assert raw == pytest.approx(fitted.raw(data.split.test.tolist()), abs=1e-6)


def test_the_card_counts_the_classes():
    notes = fit_adaptive(examples(), embedder=HashEmbedder()).notes
    assert notes[0] == "cheapest strategy that was right: no 80, one 80, multi 80; left out, as nothing was right: 0"


def test_the_card_says_that_nobody_tried_several_rounds():
    data = examples()
    assert "240 of 240 rows have no iterative answer" in fit_adaptive(data, embedder=HashEmbedder()).notes[1]
    several = [replace(made, iterative=GradedAnswer("x", correct=True)) for made in data.rows]
    tried = replace(data, table=replace(data.table, rows=several))
    assert "iterative" not in " ".join(fit_adaptive(tried, embedder=HashEmbedder()).notes)


def test_two_classes_are_enough():
    data = examples(("easy", "chained"))
    raw = fit_adaptive(data, embedder=HashEmbedder()).raw(range(len(data.rows)))
    assert ((raw > 0.5) == data.needed).mean() > 0.95


def test_without_questions_that_are_known_it_is_refused():
    with pytest.raises(BadInput, match="all of one kind"):
        fit_adaptive(examples(("single", "chained")), embedder=HashEmbedder())
