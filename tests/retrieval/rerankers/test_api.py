from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from knowgate.errors import BadInput, ModelError
from knowgate.retrieval.rerankers.remote import build_rerank_response, score_to_relevance
from knowgate.types import Passage

QUERY = "what is red"


class Lengths:
    """Longer texts are better; `nan` is no number."""

    name = "lengths"

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        return [[math.nan if one.text == "nan" else len(one.title + one.text) - 4.0 for one in row] for row in passages]


def ask(**fields: object) -> dict:
    return build_rerank_response({"query": QUERY, "documents": ["sky", "an apple"], **fields}, Lengths())


def test_documents_come_back_by_place_best_first_with_scores_between_0_and_1():
    response = ask(documents=["sky", "an apple", "tree"], model="mine")
    assert [result["index"] for result in response["results"]] == [1, 2, 0]
    assert [result["relevance_score"] for result in response["results"]] == pytest.approx(
        [1 / (1 + math.exp(-4)), 0.5, 1 / (1 + math.exp(1))]
    )
    assert response["model"] == "mine"
    assert set(response) == {"id", "model", "results", "meta"}
    assert "document" not in response["results"][0]


def test_top_n_and_documents_are_given_when_asked_for():
    response = ask(documents=["sky", {"text": "ab", "title": "a long title"}], top_n=1, return_documents=True)
    assert response["results"] == [
        {"index": 1, "relevance_score": pytest.approx(score_to_relevance(10)), "document": {"text": "ab"}}
    ]
    assert len(ask(top_n=9)["results"]) == 2
    assert len(ask(top_n=None, return_documents=None)["results"]) == 2


def test_equal_documents_stay_in_order():
    assert [result["index"] for result in ask(documents=["b", "a", "c"])["results"]] == [0, 1, 2]


def test_extreme_scores_do_not_overflow():
    assert (score_to_relevance(-1e4), score_to_relevance(1e4), score_to_relevance(0.0)) == (0.0, 1.0, 0.5)


def test_the_same_request_has_the_same_id():
    assert ask()["id"] == ask()["id"] != ask(query="other")["id"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query": " "}, "'query' is missing or empty"),
        ({"query": 3}, "'query' is missing or empty"),
        ({"documents": []}, "'documents' is missing or empty"),
        ({"documents": "text"}, "'documents' is missing or empty"),
        ({"documents": ["a", 3]}, "entry 1 is neither a text"),
        ({"documents": [{"body": "a"}]}, "entry 0 is neither a text"),
        ({"documents": ["a"] * 1001}, "1001 entries; 1000 are allowed"),
        ({"top_n": 0}, "'top_n' is 0"),
        ({"top_n": True}, "'top_n' is True"),
        ({"top_n": "3"}, "'top_n' is '3'"),
        ({"return_documents": "yes"}, "'return_documents' is 'yes'"),
    ],
)
def test_a_wrong_request_is_explained(fields, message):
    with pytest.raises(BadInput, match=message):
        ask(**fields)


def test_a_score_that_is_no_number_is_an_error():
    with pytest.raises(ModelError, match="not a number"):
        ask(documents=["nan"])
