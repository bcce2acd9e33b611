"""Rankers side by side, by hand: three questions, scores by table, a fake LLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from knowgate.data.preferences import CandidatePassage, Preference
from knowgate.errors import BadInput
from knowgate.evaluation.rankers import PassageMeanRanker, ShortestFirstRanker
from knowgate.evaluation.reranker_cache import CachedAnswerer, CachedReranker
from knowgate.evaluation.reranker_comparison import (
    HeldOutPreferences,
    build_reranker_tables,
    compare_rerankers,
    iter_prediction_lines,
    reranker_comparison_to_dict,
)
from knowgate.labels.grading import StringGrader
from knowgate.models.fake import FakeModel
from knowgate.types import Passage
from tests.support.counting import CountingModel


class Table:
    """Scores by passage id."""

    name = fingerprint = "table"

    def __init__(self, **scores: float):
        self.scores = scores
        self.asked: list[str] = []

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        self.asked += questions
        return [[self.scores[passage.id] for passage in result] for result in passages]


def row(name: str, shifts: dict[str, float], *, scores: tuple[float, ...] = (9.0, 8.0, 7.0)) -> Preference:
    candidates = tuple(
        CandidatePassage(key, f"text {key}", score=score, shift=shift)
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
BOTH = {"base": BASE, "aligned": ALIGNED}
ANSWERS = {f"what is {name}?": {"closed": "no", "open": "gold", "when": f"text {name}2"} for name in "abc"}


def held(
    rows: Sequence[Preference] = ROWS, name: str = "confidence", learnt: Sequence[Preference] = ()
) -> HeldOutPreferences:
    return HeldOutPreferences(name, "m", {"nq": list(rows)}, list(learnt))


def compared(*sets: HeldOutPreferences, **options):
    return reranker_comparison_to_dict(compare_rerankers(sets or [held()], **options))


def answering(tmp_path: Path, model=None) -> CachedAnswerer:
    return CachedAnswerer(model or FakeModel(ANSWERS), StringGrader(), tmp_path / "answers.jsonl")


def test_measures_of_every_ranker_by_hand():
    result = compared(rerankers=BOTH)["rankings"]["confidence"]
    values = {name: value["value"] for name, value in result["values"]["P@1"].items()}
    assert values == {"retriever": 0.5, "base": 0.0, "aligned": 0.5, "oracle": 1.0}
    assert result["values"]["MRR@3"]["base"]["value"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert result["less"]["base"]["P@1"]["aligned"]["value"] == 0.5
    assert result["less"]["retriever"]["P@1"]["aligned"] == {"value": 0.0, "low": -1.0, "high": 1.0}
    assert result["questions"] == 2
    assert result["chance"] == pytest.approx((1 / 3 + 1 / 2) / 2)


def test_without_a_base_rankers_are_compared_with_the_retriever():
    assert list(compared(rerankers={"aligned": ALIGNED})["rankings"]["confidence"]["less"]) == ["retriever"]


def test_the_margin_rule_keeps_the_order_of_a_clear_leader():
    result = compare_rerankers([held()], {"aligned": ALIGNED}, margin=0.5)
    ranking = reranker_comparison_to_dict(result)["rankings"]["confidence"]
    assert ranking["margin_share"] == pytest.approx(1 / 3)  # question b, whose first score leads by 8/9
    assert ranking["values"]["P@1"]["aligned, margin 0.5"]["value"] == 1.0
    assert "the margin 0.5 skips reranking for 33.3% of the questions" in build_reranker_tables(result)[0].title


def test_each_answer_is_generated_once(tmp_path: Path):
    model = CountingModel(FakeModel(ANSWERS))
    (result,) = compared(rerankers={"aligned": ALIGNED}, answerers={"fake": answering(tmp_path, model)})["answers"]
    top = {name: value["value"] for name, value in result["values"]["top 1"].items()}
    expected = {"no passages": 0.0, "retriever": 0.0, "aligned": 1.0, "oracle, confidence": 1 / 3}
    assert top == pytest.approx(expected)
    assert result["values"]["top 3"]["retriever"]["value"] == 1.0
    keys = [json.loads(line)["key"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(keys) == len(set(keys))
    again = CountingModel(FakeModel(ANSWERS))
    compared(rerankers={"aligned": ALIGNED}, answerers={"fake": answering(tmp_path, again)})
    assert not [call for call in again.calls if call[0] == "generate"]


def test_every_llm_and_data_set_has_its_tables(tmp_path: Path):
    both = HeldOutPreferences("confidence", "m", {"nq": ROWS[:1], "hotpotqa": ROWS[1:]}, [])
    knowing = FakeModel({f"what is {name}?": "gold" for name in "abc"}, name="knowing")
    llms = {"fake": answering(tmp_path), "knowing": answering(tmp_path, knowing)}
    result = compare_rerankers([both], BOTH, answerers=llms)
    tables = {table.title: table for table in build_reranker_tables(result)}
    knowing_nq = tables["Right answers of knowing to nq, 1 questions"]
    assert knowing_nq.columns == ("ranker", "top 1", "top 3")
    assert {row[0]: row[1] for row in knowing_nq.rows}["no passages"] == "100.0 % [100.0, 100.0]"
    fake_hotpotqa = tables["Right answers of fake to hotpotqa, 2 questions"]
    assert {row[0]: row[1] for row in fake_hotpotqa.rows}["aligned"] == "100.0 % [100.0, 100.0]"
    less = tables["Difference from base, in points: answers of fake to nq, 1 questions"]
    assert "base" not in [row[0] for row in less.rows]


def test_an_ungraded_answer_is_left_out_on_both_sides(tmp_path: Path):
    rows = [ROWS[0], replace(ROWS[1], answers=())]
    llm = answering(tmp_path, FakeModel({"what is a?": "gold"}))
    (result,) = compared(held(rows), rerankers={"aligned": ALIGNED}, answerers={"fake": llm})["answers"]
    assert result["values"]["top 1"]["no passages"]["value"] == 1.0
    assert result["less"]["retriever"]["top 1"]["aligned"]["value"] == 0.0


def test_each_source_has_a_table_and_an_oracle(tmp_path: Path):
    other = [replace(one, candidates=tuple(replace(c, shift=-c.shift) for c in one.candidates),
                     positives=one.negatives, negatives=one.positives) for one in ROWS]  # fmt: skip
    sets = [held(), held(other, "likelihood"), held(ROWS[:1], "benefit")]
    result = compare_rerankers(sets, BOTH, answerers={"fake": answering(tmp_path)})
    assert list(result.rankings) == ["confidence", "likelihood", "benefit"]
    rankers = result.answers["fake", "nq"].rankers
    assert rankers[-2:] == ["oracle, confidence", "oracle, likelihood"]  # benefit did not measure all questions


def test_controls_read_no_question():
    learnt = [row("z", {"a2": 0.5, "b1": -0.5, "x": 0.1})]
    result = compare_rerankers([held(learnt=learnt)], BOTH, controls=True)
    values = reranker_comparison_to_dict(result)["rankings"]["confidence"]
    assert values["values"]["P@1"]["passage means"]["value"] == 0.5  # a2 first for a; for b anything but b1
    assert "shortest first" in values["values"]["P@1"]


def test_controls_by_hand():
    passages = [[Passage("1", "long text"), Passage("2", "short")]]
    assert ShortestFirstRanker().score(["q"], passages) == [[-9.0, -5.0]]
    rows = [row("z", {"1": 0.5, "x": 0.1, "y": 0.0}), row("y", {"1": -0.1, "x": 0.1, "y": 0.0})]
    assert PassageMeanRanker(rows).score(["q"], passages) == [[pytest.approx(0.2), 0.0]]


def test_cached_scores_are_not_computed_again(tmp_path: Path):
    questions, passages = ["a?", "b?"], [[Passage("a1", "x"), Passage("a2", "y")], [Passage("b1", "z")]]
    seen: list[tuple[int, int]] = []
    first = CachedReranker(ALIGNED, tmp_path / "s.jsonl", lambda *how_far: seen.append(how_far)).score(
        questions, passages
    )
    fresh = Table(**ALIGNED.scores)
    again = CachedReranker(fresh, tmp_path / "s.jsonl")
    assert again.score([*questions, "c?"], [*passages, [Passage("c1", "w")]]) == [*first, [0.0]]
    assert fresh.asked == ["c?"]
    assert seen == [(2, 2)]


def test_an_incomplete_line_is_computed_again(tmp_path: Path):
    file = tmp_path / "s.jsonl"
    result = CachedReranker(ALIGNED, file).score(["a?"], [[Passage("a1", "x"), Passage("a2", "y")]])
    file.write_bytes(file.read_bytes()[:-9])
    assert (
        CachedReranker(Table(**ALIGNED.scores), file).score(["a?"], [[Passage("a1", "x"), Passage("a2", "y")]])
        == result
    )
    assert len(file.read_text().splitlines()) == 3  # the whole line, and both scores anew


def test_cached_scores_depend_on_the_reranker_fingerprint(tmp_path: Path):
    CachedReranker(ALIGNED, tmp_path / "s.jsonl").score(["a?"], [[Passage("a1", "x")]])
    other = Table(a1=7.0)
    other.fingerprint = "retrained"
    assert CachedReranker(other, tmp_path / "s.jsonl").score(["a?"], [[Passage("a1", "x")]]) == [[7.0]]


def test_predictions_hold_no_texts_and_are_enough_for_the_measures(tmp_path: Path):
    result = compare_rerankers([held()], BOTH, answerers={"fake": answering(tmp_path)})
    lines = [json.loads(line) for line in iter_prediction_lines(result)]
    hits = {line["ranker"]: line["hits"] for line in lines if "hits" in line}
    assert hits["base"] == {"a": "001", "b": "01"}
    right = next(line["right"] for line in lines if line.get("ranker") == "aligned" and line.get("shown") == "top 1")
    assert right == {"a": 1, "b": 1, "c": 1}
    assert "text a1" not in "".join(map(str, lines))


def test_the_tables_say_what_they_are_measured_on():
    first, second = build_reranker_tables(compare_rerankers([held()], BOTH))
    assert first.title == (
        "Rankers: preferences by confidence, 2 questions with helpful and unhelpful passages; a random order has P@1 0.417"
    )
    assert first.columns[:4] == ("ranker", "P@1", "R@1", "MRR@1")
    assert [line[0] for line in first.rows] == ["retriever", "base", "aligned", "oracle"]
    assert [line[0] for line in second.rows] == ["retriever", "aligned", "oracle"]


def test_nothing_to_rank_is_an_error():
    with pytest.raises(BadInput, match="none of the 1 held-out questions"):
        compare_rerankers([held(ROWS[2:])], {"aligned": ALIGNED})
