import dataclasses

import pytest

from knowgate.evaluation.boundary import MAX_EXTREME_QUESTIONS, measure_boundary
from tests.support.runs_by_hand import row, side


def test_accuracy_and_benefit_are_of_the_greedy_answers():
    rows = [
        row("a", side(True), side(True), mask=side(False)),
        row("b", side(False), side(True), mask=side(True)),
        row("c", side(False), side(True)),
        row("d", side(True), side(False)),
    ]
    result = measure_boundary(rows)
    accuracy = result.accuracy
    assert [part.value for part in (accuracy.closed, accuracy.open, accuracy.mask)] == [0.5, 0.75, 0.5]
    assert dataclasses.astuple(result.benefit) == (2, 1, 1)


def test_closed_and_open_book_are_compared_on_the_questions_that_have_both():
    result = measure_boundary(
        [row("a", side(True), side(True)), row("b", side(False), side(True)), row("c", side(True))]
    )
    assert (result.accuracy.closed.hits, result.accuracy.closed.n) == (2, 3)
    assert (result.accuracy.matched.hits, result.accuracy.matched.n) == (1, 2)


def test_a_failed_question_is_counted_and_left_out():
    result = measure_boundary([row("a", side(True)), row("b", error="timeout"), row("c", error="timeout")])
    assert (result.counts.rows, result.counts.failed, result.counts.reasons) == (3, 2, (("timeout", 2),))
    assert result.accuracy.closed.n == 1


def test_without_gold_answers_there_is_certainty_but_no_mastery():
    ungraded = row("a", side(None, None, 0.5), side(None, None, 0.9), answers=())
    result = measure_boundary([ungraded, row("b", side(True, 0.9, 0.7), side(True, 1.0, 1.0))])
    assert result.counts.without_gold == 1
    assert sum(item.n for item in result.effects["closed"]["mastery"]) == 1
    assert sum(item.n for item in result.effects["closed"]["certainty"]) == 2
    assert result.accuracy.closed.n == 1


def test_intervals_exclude_their_upper_end_except_the_last():
    values = [0.0, 0.199, 0.2, 0.6, 0.8, 1.0]
    result = measure_boundary([row(str(value), side(True, value), side(True, value)) for value in values])
    assert [item.n for item in result.effects["closed"]["mastery"]] == [2, 1, 0, 1, 2]


@pytest.mark.parametrize("correct", range(31))
def test_a_share_on_a_border_lies_in_the_upper_interval(correct):
    value = round(correct / 30, 6)
    result = measure_boundary([row("a", side(True, value), side(True, value))])
    assert [item.n for item in result.effects["closed"]["mastery"]].index(1) == min(4, correct // 6)


def test_effects_are_counted_per_interval_of_each_indicator():
    rows = [
        row("a", side(False, 0.1, 0.9), side(True, 0.6, 0.8)),
        row("b", side(False, 0.1, 0.9), side(True, 0.1, 1.0)),
        row("c", side(False, 0.1, 0.3), side(True, 0.0, 0.3)),
    ]
    effects = measure_boundary(rows).effects["closed"]
    assert dataclasses.astuple(effects["mastery"][0]) == (0.0, 0.2, 1, 1, 1)
    assert dataclasses.astuple(effects["certainty"][4]) == (0.8, 1.0, 1, 0, 1)
    assert dataclasses.astuple(effects["certainty"][1]) == (0.2, 0.4, 0, 1, 0)


def test_correlation_uses_questions_with_both_indicators():
    values = [(0.1, 0.1), (0.2, 0.3), (0.3, 0.2), (None, 0.9)]
    result = measure_boundary([row(str(place), side(True, *pair)) for place, pair in enumerate(values)]).correlation
    assert (result.n, result.r) == (3, pytest.approx(0.5))


def test_copy_rate_counts_masked_answers_where_open_certainty_is_one():
    texts = ["MASK", "mask.", "It is MASK", "Rome"]
    certain = [row(text, side(), side(certainty=1.0), mask=side(False, None, None, text)) for text in texts]
    unsure = [row("u", side(), side(certainty=0.9), mask=side(False, None, None, "Rome"))]
    result = measure_boundary(certain + unsure + [row("n", side(), side())]).copying
    assert (result.is_mask.hits, result.is_mask.n) == (2, 4)
    assert (result.says_mask.hits, result.says_mask.n) == (3, 4)
    assert (result.anywhere.hits, result.anywhere.n) == (2, 5)


def test_there_is_no_copy_rate_without_masked_answers():
    assert measure_boundary([row("a", side(), side())]).copying is None


def test_graders_are_compared_on_regraded_answers():
    rows = [
        row("a", side(text="Paris"), side(text="It is Paris")),
        row("b", side(text="Rome"), side(text="Paris")),
    ]
    closed, opened = measure_boundary(rows).agreements
    assert (closed.side, closed.first, closed.second, closed.agree, closed.kappa) == (
        "closed",
        "exact",
        "contains",
        1,
        1,
    )
    assert (opened.side, opened.agree, opened.only_second) == ("open", 0.5, 1)


def test_a_judge_is_compared_with_the_string_graders():
    judged = row("a", side(True, text="the French capital"), grader="judge:implies:fake")
    result = {(item.first, item.second): item.agree for item in measure_boundary([judged]).agreements}
    assert result == {
        ("exact", "contains"): 1.0,
        ("exact", "judge:implies:fake"): 0.0,
        ("contains", "judge:implies:fake"): 0.0,
    }


def test_multiple_choice_is_also_compared_by_letter():
    asked = row("a", side(text="B"), choices=("Rome", "Paris"), grader="choice")
    result = {(item.first, item.second): item.only_second for item in measure_boundary([asked]).agreements}
    assert result == {("exact", "contains"): 0, ("exact", "choice"): 1, ("contains", "choice"): 1}


def test_an_unreadable_verdict_is_not_compared():
    judged = row("a", side(None), grader="judge:implies:fake", unparsable=1)
    result = measure_boundary([judged])
    assert result.counts.unparsable == 1
    assert [item.second for item in result.agreements] == ["contains"]


def test_extremes_are_ordered_by_mastery_change_then_benefit():
    rows = [
        row("same", side(True, 0.5), side(True, 0.5)),
        row("little", side(True, 0.5), side(True, 0.4)),
        row("much", side(True, 0.9), side(True, 0.1)),
        row("much and wrong", side(True, 0.9), side(False, 0.1)),
        row("better", side(True, 0.1), side(True, 0.2)),
        row("best", side(False, 0.1), side(True, 1.0)),
        row("only the greedy answer", side(False, 0.4), side(True, 0.4)),
    ]
    result = measure_boundary(rows)
    assert [item.id for item in result.harmed] == ["much and wrong", "much", "little"]
    assert [item.id for item in result.helped] == ["best", "better", "only the greedy answer"]


def test_at_most_twenty_extreme_questions_are_returned():
    rows = [row(str(place), side(True, 1.0), side(True, place / 100)) for place in range(50)]
    assert [item.id for item in measure_boundary(rows).harmed] == [str(place) for place in range(MAX_EXTREME_QUESTIONS)]


def test_an_empty_run_has_no_values():
    result = measure_boundary([])
    assert result.accuracy.closed.value is None
    assert result.savings == {"mastery": None, "certainty": None}
    assert result.agreements == result.slices == result.harmed == ()


def test_figure_three_has_a_panel_for_each_way_of_answering():
    """One question that retrieval helps: mastery .1 closed-book, .9 with passages, .5 with the answers masked."""
    result = measure_boundary([row("a", side(False, 0.1), side(True, 0.9), mask=side(False, 0.5, 0.3))])
    helped = [[item.beneficial for item in panel["mastery"]] for panel in result.effects.values()]
    assert helped == [[1, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 1, 0, 0]]


def test_a_panel_without_sampled_answers_is_empty():
    result = measure_boundary([row("a", side(False, 0.1), side(True, 0.9), mask=side(False, None, None))])
    assert [item.n for item in result.effects["mask"]["mastery"]] == [0] * 5


def test_copying_is_also_counted_where_the_masked_samples_agree():
    agreed = [row(text, side(), side(certainty=0.5), mask=side(False, 0.0, 1.0, text)) for text in ("MASK", "Rome")]
    unsure = row("u", side(), side(), mask=side(False, 0.0, 0.9, "MASK"))
    result = measure_boundary([*agreed, unsure]).copying
    assert (result.under_mask.hits, result.under_mask.n) == (1, 2)
