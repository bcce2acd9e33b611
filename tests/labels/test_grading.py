"""Graders by rule and by judge."""

import pytest

from knowgate.errors import BadSetting, UnknownName
from knowgate.labels.grading import Grade, JudgeGrader, StringGrader, load_grader, load_graders
from knowgate.types import Completion, Question

PARIS = Question("What is the capital of France?", answers=("Paris",))


class Judge:
    """Says what it is told to, and remembers the prompts."""

    name = "judge"

    def __init__(self, *replies):
        self.replies = list(replies)
        self.prompts = []

    def generate(self, prompts, *, max_tokens, temperature=0.0, n=1, seed=None, resume=None):
        assert temperature == 0
        self.prompts += [prompt.text for prompt in prompts]
        return [[Completion(self.replies.pop(0))] for _ in prompts]


def test_exact_needs_the_whole_answer_and_contains_a_part():
    answers = ["The capital is Paris.", "paris"]
    assert [g.correct for g in StringGrader("exact").grade(answers, [PARIS, PARIS])] == [False, True]
    assert [g.correct for g in StringGrader("contains").grade(answers, [PARIS, PARIS])] == [True, True]


def test_equal_answers_to_different_questions_are_graded_apart():
    rome = Question("What is the capital of Italy?", answers=("Rome",))
    assert [g.correct for g in StringGrader().grade(["Paris", "Paris"], [PARIS, rome])] == [True, False]


def test_without_gold_answers_the_grade_is_none():
    assert StringGrader().grade(["x"], [Question("Why?", answers=("", " "))]) == [Grade(None)]


def test_multiple_choice_is_graded_by_letter_whatever_the_rule():
    question = Question("Which?", answers=("red",), choices=("blue", "red"))
    assert [g.correct for g in StringGrader("exact").grade(["B.", "A"], [question] * 2)] == [True, False]


def test_grades_changed_by_the_echo_guard_are_marked():
    question = Question("Is Paris or London the capital of France?", answers=("Paris",))
    echo = "Is Paris or London the capital of France?"
    assert StringGrader().grade([echo], [question]) == [Grade(False, guarded=True)]


@pytest.mark.parametrize(
    ("reply", "correct"),
    [("Yes", True), ("No.", False), ("1", True), ("0", False), ("是", True), ("否", False), ("不包含", False)],
)
def test_a_judge_says_yes_or_no(reply, correct):
    assert JudgeGrader(Judge(reply)).grade(["x"], [PARIS]) == [Grade(correct)]


def test_other_verdicts_of_a_judge_are_unparsable():
    assert JudgeGrader(Judge("Perhaps")).grade(["x"], [PARIS]) == [Grade(None, unparsable=True)]


def test_equal_predictions_for_a_question_are_judged_once():
    judge = Judge("Yes", "No")
    grades = JudgeGrader(judge).grade(["Paris", "Paris", "Rome"], [PARIS] * 3)
    assert [g.correct for g in grades] == [True, True, False]
    assert len(judge.prompts) == 2


def test_the_contains_judge_does_not_see_the_question():
    judge = Judge("1", "1")
    JudgeGrader(judge, "contains").grade(["Paris"], [PARIS])
    JudgeGrader(judge, "implies").grade(["Paris"], [PARIS])
    assert PARIS.text not in judge.prompts[0]
    assert PARIS.text in judge.prompts[1]


def test_a_chinese_question_gets_the_chinese_judge():
    judge = Judge("1")
    JudgeGrader(judge, "contains").grade(["河南省"], [Question("郑州是哪个省的", answers=("河南",))])
    assert "给定预测和答案" in judge.prompts[0]


def test_an_unknown_grader_error_lists_the_known_ones():
    with pytest.raises(UnknownName, match="exact, judge"):
        load_grader("fuzzy")


def test_a_second_grader_follows_a_comma():
    first, second = load_graders("exact, judge", Judge())
    assert (first.name, second.name) == ("exact", "judge:implies:judge")
    assert load_graders("contains")[1] is None


@pytest.mark.parametrize("names", ["exact,exact", "exact,contains,choice"])
def test_other_numbers_of_graders_are_rejected(names):
    with pytest.raises(BadSetting, match="must name one grader, or two different ones"):
        load_graders(names)
