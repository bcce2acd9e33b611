"""The balanced self-assessment set and its stress sets."""

import pytest

from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.errors import BadInput
from knowgate.papers.self_assessment import build_kb_sat


def row(number, correct, question=None, lang="en"):
    text = question or f"Which film did Anna Smith{number} make in 19{number:02d}?"
    return LabelRow(id=str(number), question=text, lang=lang, answers=("x",), closed=GradedAnswer("a", correct=correct))


ROWS = [row(i, i < 4) for i in range(10, 20)] + [row(i, True) for i in range(20, 23)]


def test_the_set_has_as_many_right_as_wrong_questions():
    sets = build_kb_sat(ROWS)
    known = [record["meta"]["known"] for record in sets.balanced]
    assert known.count(True) == known.count(False) == 3


def test_known_means_answered_right():
    right = {row.id for row in ROWS if row.closed.correct}
    assert all((record["id"] in right) == record["meta"]["known"] for record in build_kb_sat(ROWS).balanced)


def test_the_same_seed_gives_the_same_sets():
    assert build_kb_sat(ROWS, seed=3) == build_kb_sat(ROWS, seed=3)


def test_a_swapped_question_has_an_entity_of_another_one_and_is_unknown():
    originals = {row.id: row.question for row in ROWS}
    swapped = build_kb_sat(ROWS).swapped
    assert len(swapped) == 3
    for record in swapped:
        assert record["question"] != originals[record["meta"]["source"]]
        assert not record["meta"]["known"]
        assert record["answers"] == []


def test_a_rare_word_is_put_in_front_and_the_question_stays_known():
    for record in build_kb_sat(ROWS).rare:
        word, _, question = record["question"].partition(" | ")
        assert word.isalpha()
        assert question == next(row.question for row in ROWS if row.id == record["meta"]["source"])
        assert record["meta"]["known"]


def test_chinese_titles_are_entities():
    rows = [row(1, True, "《红楼梦》的作者是谁?", "zh"), row(2, False, "《三国演义》的作者是谁?", "zh")]
    assert build_kb_sat(rows).swapped[0]["question"] == "《三国演义》的作者是谁?"


@pytest.mark.parametrize("seed", range(10))
def test_a_name_is_never_replaced_by_a_year_or_a_title(seed):
    rows = [
        row(0, True, "Where was Marie Curie in 1911?"),
        row(1, False, "What did “Dune” win in 1966?"),
        row(2, False, "Where was Niels Bohr?"),
    ]
    swapped = build_kb_sat(rows, seed).swapped[0]["question"]
    assert swapped in ("Where was Niels Bohr in 1911?", "Where was Marie Curie in 1966?")


def test_a_question_without_a_replaceable_entity_is_not_swapped():
    nameless = build_kb_sat([row(1, True, "who wrote it?"), row(2, False)])
    assert nameless.swapped == []
    alone = build_kb_sat([row(1, True), row(2, False, "who wrote it?")])
    assert alone.swapped == []


def test_failed_and_ungraded_rows_are_left_out():
    rows = [row(1, True), row(2, False), LabelRow("3", "q", "en", error="bad"), row(4, None)]
    assert len(build_kb_sat(rows).balanced) == 2


def test_one_kind_of_answer_is_not_enough():
    with pytest.raises(BadInput, match="2 right and 0 wrong"):
        build_kb_sat([row(1, True), row(2, True)])
