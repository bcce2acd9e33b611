"""Features of questions and draft answers that need no model."""

import numpy as np
import pytest

from knowgate.data.signals.answer_text import (
    ANSWER_FEATURES,
    QUESTION_FEATURES,
    answer_features,
    classify_question,
    question_features,
)
from knowgate.types import Question


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Who wrote Hamlet?", "who"),
        ("In what year did Rome fall?", "when"),
        ("How many moons has Mars?", "how_many"),
        ("Which city hosted the games?", "where"),
        ("Which novel is it?", "which"),
        ("Is Mars red?", "yes_no"),
        ("Why is the sky blue?", "how_or_why"),
        ("what is a noun", "what"),
        ("Name a noun.", "other_type"),
        ("谁写了哈姆雷特?", "who"),
    ],
)
def test_the_type_of_a_question(text, kind):
    assert classify_question(text) == kind


def feature(name, question="Who?", draft=""):
    return answer_features([Question(question)], [draft])[0][ANSWER_FEATURES.index(name)]


def test_a_hedge_at_the_start_is_noticed_and_one_far_behind_is_only_counted():
    assert feature("hedge_at_start", draft="It may be Rome.") == 1
    assert feature("hedge_at_start", draft="Rome. " + "x" * 90 + " maybe") == 0
    assert feature("hedges", draft="Rome. " + "x" * 90 + " maybe") == pytest.approx(np.log(2))


def test_overlap_is_the_share_of_draft_words_from_the_question():
    assert feature("overlap", "Who wrote Hamlet?", "Shakespeare wrote Hamlet") == pytest.approx(2 / 3)


def test_years_numbers_and_names_in_the_draft():
    assert (feature("draft_years", draft="in 1969"), feature("draft_numbers", draft="12 men")) == (1, 1)
    assert feature("draft_years", draft="12 men") == 0
    assert feature("draft_names", draft="Ada met Bob") == pytest.approx(np.log(3))


def test_exactly_one_type_is_set():
    rows = question_features([Question("Who?"), Question("Name one.")])
    assert rows[:, :9].sum(axis=1).tolist() == [1, 1]


def test_shapes_also_hold_for_no_questions():
    assert question_features([]).shape == (0, len(QUESTION_FEATURES))
    assert answer_features([], []).shape == (0, len(ANSWER_FEATURES))
