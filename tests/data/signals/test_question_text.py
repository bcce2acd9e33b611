"""Features of questions that need no model."""

import pytest

from knowgate.data.signals.question_text import QUESTION_FEATURES, classify_question, question_features
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


def test_exactly_one_type_is_set():
    rows = question_features([Question("Who?"), Question("Name one.")])
    assert rows[:, :9].sum(axis=1).tolist() == [1, 1]


def test_shapes_also_hold_for_no_questions():
    assert question_features([]).shape == (0, len(QUESTION_FEATURES))
