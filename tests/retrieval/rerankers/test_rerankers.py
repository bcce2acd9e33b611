from __future__ import annotations

from collections.abc import Sequence

import pytest

from knowgate.errors import BadSetting, ModelError, UnknownName
from knowgate.retrieval.rerankers import can_skip_reranking, compute_score_lead, load_reranker, rerank
from knowgate.types import Passage


class FixedReranker:
    """Returns the scores it was created with."""

    name = "fixed"

    def __init__(self, *scores: list[float]):
        self.scores = list(scores)

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        return self.scores


def make_passages(names: str) -> list[Passage]:
    return [Passage(name, f"text {name}", score=0.5) for name in names]


# --- order ------------------------------------------------------------------------------------------


def test_passages_are_sorted_by_their_new_scores():
    (best,) = rerank(FixedReranker([0.1, 3.0, -2.0]), ["q"], [make_passages("abc")], 2)
    assert [(passage.id, passage.score) for passage in best] == [("b", 3.0), ("a", 0.1)]


def test_equal_scores_keep_the_order_of_the_input():
    (best,) = rerank(FixedReranker([1.0, 1.0, 2.0]), ["q"], [make_passages("abc")], 3)
    assert [passage.id for passage in best] == ["c", "a", "b"]


def test_a_question_without_passages_gets_none():
    assert rerank(FixedReranker([], [1.0]), ["p", "q"], [[], make_passages("a")], 3)[0] == []


def test_the_input_passages_are_not_changed():
    passages = make_passages("ab")
    rerank(FixedReranker([1.0, 2.0]), ["q"], [passages], 2)
    assert passages == make_passages("ab")


def test_a_score_that_is_not_a_number_is_an_error():
    with pytest.raises(ModelError, match="not a number"):
        rerank(FixedReranker([1.0, float("nan")]), ["q"], [make_passages("ab")], 2)


def test_k_must_be_positive():
    with pytest.raises(BadSetting, match="k=0 is not allowed"):
        rerank(FixedReranker([1.0]), ["q"], [make_passages("a")], 0)


# --- skipping ---------------------------------------------------------------------------------------


def make_scored(*scores: float | None) -> list[Passage]:
    return [Passage(str(index), "text", score=score) for index, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ((10.0, 8.0, 1.0), 0.2),
        ((10.0, 10.0), 0.0),
        ((4.0, -3.0), 1.0),
        ((5.0,), 1.0),
        ((), 0.0),
        ((10.0, None), 0.0),
        ((2.0, 9.0), 0.0),  # not sorted by score, so the scores say nothing about the order
        ((-1.0, -5.0), 0.0),
    ],
)
def test_the_lead_is_relative_to_the_best_score(scores, expected):
    assert compute_score_lead(make_scored(*scores)) == pytest.approx(expected)


def test_reranking_is_skipped_when_the_lead_reaches_the_margin():
    assert can_skip_reranking(make_scored(10.0, 8.0), 0.2)
    assert not can_skip_reranking(make_scored(10.0, 8.0), 0.21)
    assert not can_skip_reranking(make_scored(10.0, 0.0), None)


# --- specs ------------------------------------------------------------------------------------------


def test_an_unknown_reranker_lists_the_known_ones():
    with pytest.raises(UnknownName, match=r"Known: .*cross-encoder"):
        load_reranker("colbert")


def test_a_cross_encoder_without_a_model_is_an_error():
    with pytest.raises(BadSetting, match="cross-encoder:NAME_OR_DIR"):
        load_reranker("cross-encoder")


@pytest.mark.parametrize("spec", ["cross-encoder:owner/model", "owner/model"])
def test_a_hub_name_is_a_cross_encoder(spec: str):
    assert load_reranker(spec).name == "cross-encoder:owner/model"
