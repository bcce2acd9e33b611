import pytest

from knowgate.evaluation.boundary import measure_boundary
from tests.support.runs_by_hand import row, side


def curve(cases, indicator="mastery"):
    rows = [row(str(i), side(closed, value, 0.5), side(opened)) for i, (value, closed, opened) in enumerate(cases)]
    return measure_boundary(rows).savings[indicator]


# closed right on the two highest, open right on the two lowest and one of the highest
CASES = [(1.0, True, False), (0.8, True, True), (0.2, False, True), (0.0, False, True)]


def test_every_distinct_threshold_is_a_point_from_always_to_never():
    points = curve(CASES).points
    assert [(p.threshold, p.saved, p.accuracy) for p in points] == [
        (None, 0.0, 0.75),
        (1.0, 0.25, 1.0),
        (0.8, 0.5, 1.0),
        (0.2, 0.75, 0.75),
        (0.0, 1.0, 0.5),
    ]


def test_matched_random_lies_between_always_and_never():
    result = curve(CASES)
    assert (result.n, result.always, result.never) == (4, 0.75, 0.5)
    assert [p.random for p in result.points] == pytest.approx([0.75, 0.6875, 0.625, 0.5625, 0.5])


def test_equal_indicators_are_skipped_together():
    assert [p.saved for p in curve(CASES, "certainty").points] == [0.0, 1.0]


def test_marks_are_thresholds_whether_or_not_a_question_has_them():
    assert [(p.threshold, p.saved) for p in curve(CASES).marks] == [
        (0.2, 0.75),
        (0.4, 0.5),
        (0.6, 0.5),
        (0.8, 0.5),
        (1.0, 0.25),
    ]


def test_questions_without_a_graded_open_answer_are_left_out():
    rows = [row("a", side(True, 1.0), side(True)), row("b", side(True, 1.0)), row("c", side(None, None), side(None))]
    assert measure_boundary(rows).savings["mastery"].n == 1


def test_a_closed_book_run_has_no_curve():
    assert measure_boundary([row("a", side())]).savings == {"mastery": None, "certainty": None}
