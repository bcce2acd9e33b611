from __future__ import annotations

from collections.abc import Sequence

import pytest

from knowgate.errors import BadSetting, ModelError, UnknownName
from knowgate.retrieval.rerankers import load_reranker, rerank
from knowgate.types import Passage


class Fixed:
    """Gives the scores it was made with."""

    name = "fixed"

    def __init__(self, *scores: list[float]):
        self.scores = list(scores)

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        return self.scores


def passages(names: str) -> list[Passage]:
    return [Passage(name, f"text {name}", score=0.5) for name in names]


def test_passages_are_sorted_by_their_new_scores():
    (found,) = rerank(Fixed([0.1, 3.0, -2.0]), ["q"], [passages("abc")], 2)
    assert [(passage.id, passage.score) for passage in found] == [("b", 3.0), ("a", 0.1)]


def test_equal_scores_keep_the_order_they_came_in():
    (found,) = rerank(Fixed([1.0, 1.0, 2.0]), ["q"], [passages("abc")], 3)
    assert [passage.id for passage in found] == ["c", "a", "b"]


def test_a_question_without_passages_stays_without():
    assert rerank(Fixed([], [1.0]), ["p", "q"], [[], passages("a")], 3)[0] == []


def test_the_passages_given_are_not_changed():
    given = passages("ab")
    rerank(Fixed([1.0, 2.0]), ["q"], [given], 2)
    assert given == passages("ab")


def test_a_score_that_is_not_a_number_is_an_error():
    with pytest.raises(ModelError, match="not a number"):
        rerank(Fixed([1.0, float("nan")]), ["q"], [passages("ab")], 2)


def test_k_must_be_positive():
    with pytest.raises(BadSetting, match="k=0 is not allowed"):
        rerank(Fixed([1.0]), ["q"], [passages("a")], 0)


def test_an_unknown_reranker_lists_the_known_ones():
    with pytest.raises(UnknownName, match=r"Known: .*cross-encoder"):
        load_reranker("colbert")


def test_a_cross_encoder_without_a_model_is_refused():
    with pytest.raises(BadSetting, match="cross-encoder:NAME_OR_DIR"):
        load_reranker("cross-encoder")


@pytest.mark.parametrize("spec", ["cross-encoder:owner/model", "owner/model"])
def test_a_hub_name_is_a_cross_encoder(spec: str):
    assert load_reranker(spec).name == "cross-encoder:owner/model"
