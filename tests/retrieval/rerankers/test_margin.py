from __future__ import annotations

import pytest

from knowgate.retrieval.rerankers import can_skip_reranking, compute_score_lead
from knowgate.types import Passage


def found(*scores: float | None) -> list[Passage]:
    return [Passage(str(place), "text", score=score) for place, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ((10.0, 8.0, 1.0), 0.2),
        ((10.0, 10.0), 0.0),
        ((4.0, -3.0), 1.0),
        ((5.0,), 1.0),
        ((), 0.0),
        ((10.0, None), 0.0),
        ((2.0, 9.0), 0.0),  # not the retriever's order: its scores do not tell
        ((-1.0, -5.0), 0.0),
    ],
)
def test_the_lead_is_a_share_of_the_best_score(scores, expected):
    assert compute_score_lead(found(*scores)) == pytest.approx(expected)


def test_reranking_is_skipped_from_the_margin_on():
    assert can_skip_reranking(found(10.0, 8.0), 0.2)
    assert not can_skip_reranking(found(10.0, 8.0), 0.21)
    assert not can_skip_reranking(found(10.0, 0.0), None)
