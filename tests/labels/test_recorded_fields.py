"""Grades, log-probabilities, passages and costs as data files record them."""

import pytest

from knowgate.errors import BadInput
from knowgate.labels.answer_import import parse_amount, parse_grade, parse_passages, parse_token_counts, parse_tokens


@pytest.mark.parametrize(
    ("value", "right"),
    [
        (True, True),
        (0, False),
        (1.0, True),
        (-1, False),
        ("correct", True),
        ("Thumbs_Down", False),
        ("", None),
        (None, None),
    ],
)
def test_grades_are_booleans_numbers_or_words(value, right):
    assert parse_grade(value, "it", None) is right


@pytest.mark.parametrize(("value", "right"), [(0.5, True), (0.49, False), ("4", True), (True, True), (None, None)])
def test_scores_pass_from_the_pass_score_on(value, right):
    assert parse_grade(value, "it", 0.5) is right


@pytest.mark.parametrize(
    ("value", "message"), [(0.7, "Set `pass_score`"), ("perhaps", "not a grade"), ([1], "not a grade")]
)
def test_other_grades_are_rejected(value, message):
    with pytest.raises(BadInput, match=message):
        parse_grade(value, "it", None)


@pytest.mark.parametrize(
    "value",
    [
        [{"token": "a", "logprob": -1}],
        {"content": [{"token": "a", "logprob": -1, "top_logprobs": []}]},
        {"tokens": ["a"], "token_logprobs": [-1]},
    ],
)
def test_log_probabilities_are_read_in_every_format_of_openai(value):
    (token,) = parse_tokens(value, "it")
    assert (token.text, token.logprob, token.margin) == ("a", -1, None)


def test_bare_log_probabilities_have_no_texts():
    assert [(token.text, token.logprob) for token in parse_tokens([-0.5, -2], "it")] == [("", -0.5), ("", -2)]


@pytest.mark.parametrize("value", ["x", [{"token": "a"}], [0.5], {"a": 1}])
def test_other_log_probabilities_are_rejected(value):
    with pytest.raises(BadInput, match="not a list of log-probabilities"):
        parse_tokens(value, "it")


def test_passages_of_other_tools_are_read():
    documents = [{"page_content": "A", "metadata": {"title": "T"}}, "B", {"nothing": 1}]
    assert [(passage.title, passage.text) for passage in parse_passages(documents)] == [("T", "A"), ("", "B")]
    assert [passage.text for passage in parse_passages("one text")] == ["one text"]


def test_token_counts_are_a_number_or_a_usage_object():
    assert parse_token_counts(7, "it") == (None, 7)
    assert parse_token_counts({"input_tokens": 3, "output_tokens": 4}, "it") == (3, 4)
    assert parse_token_counts(None, "it") == (None, None)


@pytest.mark.parametrize("value", [-1, "many", True, float("nan")])
def test_invalid_amounts_are_rejected(value):
    with pytest.raises(BadInput, match="must be a number of at least 0"):
        parse_amount(value, "it")
