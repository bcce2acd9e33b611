"""Rankers side by side, by hand: three questions, scores by table, a fake LLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from knowgate.errors import BadInput
from knowgate.evaluation.reranking.answers import Answering
from knowgate.evaluation.reranking.rankers import compare_rankers, markdown, summary
from knowgate.labels.grading import StringGrader
from knowgate.models.fake import FakeModel
from knowgate.preferences.record import Candidate, Preference
from knowgate.types import Passage
from tests.support.counting import CountingModel


class Table:
    """Scores by passage id."""

    name = "table"

    def __init__(self, **scores: float):
        self.scores = scores

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        return [[self.scores[passage.id] for passage in found] for found in passages]


def row(name: str, shifts: dict[str, float], *, scores: tuple[float, ...] = (9.0, 8.0, 7.0)) -> Preference:
    candidates = tuple(
        Candidate(key, f"text {key}", score=score, shift=shift)
        for (key, shift), score in zip(shifts.items(), scores, strict=True)
    )
    places = range(len(candidates))
    return Preference(
        name, f"what is {name}?", "test", answers=("gold",), base=0.5, candidates=candidates,
        positives=tuple(place for place in places if candidates[place].shift > 0),
        negatives=tuple(place for place in places if candidates[place].shift < 0),
    )  # fmt: skip


ROWS = [
    row("a", {"a1": -0.1, "a2": 0.2, "a3": -0.3}),
    row("b", {"b1": 0.1, "b2": -0.2, "b3": 0.0}, scores=(9.0, 1.0, 0.5)),
    row("c", {"c1": -0.1, "c2": -0.2, "c3": -0.3}),
]
BASE = Table(a1=1, a2=0, a3=2, b1=0, b2=1, b3=2, c1=0, c2=0, c3=1)
ALIGNED = Table(a1=0, a2=1, a3=0, b1=0, b2=1, b3=0, c1=0, c2=1, c3=0)


def test_measures_of_every_ranker_by_hand():
    found = summary(compare_rankers(ROWS, {"base": BASE, "aligned": ALIGNED}))
    values = {name: value["value"] for name, value in found["values"]["P@1"].items()}
    assert values == {"retriever": 0.5, "base": 0.0, "aligned": 0.5, "oracle": 1.0}
    assert found["values"]["MRR@3"]["base"]["value"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert found["differences"]["P@1"]["aligned - base"]["value"] == 0.5
    assert found["differences"]["P@1"]["aligned - retriever"] == {"value": 0.0, "low": -1.0, "high": 1.0}
    assert (found["questions_ranked"], found["questions_answered"]) == (2, 0)
    assert found["chance"] == pytest.approx((1 / 3 + 1 / 2) / 2)


def test_the_margin_rule_keeps_the_retrievers_order_where_it_is_sure():
    found = summary(compare_rankers(ROWS, {"aligned": ALIGNED}, margin=0.5))
    assert found["margin_share"] == pytest.approx(1 / 3)  # question b, whose first score leads by 8/9
    assert found["values"]["P@1"]["aligned, margin 0.5"]["value"] == 1.0
    assert "skips reranking for 33.3% of the questions" in markdown(found)


def test_answers_are_graded_and_asked_once(tmp_path: Path):
    table = {f"what is {name}?": {"closed": "no", "open": "gold", "when": f"text {name}2"} for name in "abc"}
    model = CountingModel(FakeModel(table))
    answering = Answering(model, StringGrader(), tmp_path / "answers.jsonl")
    found = summary(compare_rankers(ROWS, {"aligned": ALIGNED}, answering=answering))
    top = {name: value["value"] for name, value in found["values"]["accuracy, top 1"].items()}
    assert top == pytest.approx({"no passages": 0.0, "retriever": 0.0, "aligned": 1.0, "oracle": 1 / 3})
    assert found["values"]["accuracy, top 3"]["retriever"]["value"] == 1.0
    keys = [json.loads(line)["key"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(keys) == len(set(keys))
    again = CountingModel(FakeModel(table))
    compare_rankers(ROWS, {"aligned": ALIGNED}, answering=replace(answering, model=again))
    assert not [call for call in again.calls if call[0] == "generate"]


def test_an_ungraded_answer_is_left_out_on_both_sides(tmp_path: Path):
    rows = [ROWS[0], replace(ROWS[1], answers=())]
    answering = Answering(FakeModel({"what is a?": "gold"}), StringGrader(), tmp_path / "answers.jsonl")
    found = summary(compare_rankers(rows, {"aligned": ALIGNED}, answering=answering))
    assert found["values"]["accuracy, top 1"]["no passages"]["value"] == 1.0
    assert found["differences"]["accuracy, top 1"]["aligned - retriever"]["value"] == 0.0


def test_the_table_says_what_it_is_measured_on():
    text = markdown(summary(compare_rankers(ROWS, {"base": BASE, "aligned": ALIGNED})))
    assert "on 2 held-out questions with passages of both kinds. A random order has P@1 0.417." in text
    assert "| measure | retriever | base | aligned | oracle |" in text
    assert "| difference | base - retriever | aligned - retriever | aligned - base |" in text


def test_nothing_to_rank_is_an_error():
    with pytest.raises(BadInput, match="none of the 1 held-out questions has passages of both kinds"):
        compare_rankers(ROWS[2:], {"aligned": ALIGNED})
