from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from knowgate.errors import ModelError  # noqa: E402
from knowgate.training.reranker_trainer import RankingGroup, compute_batch_loss, infonce  # noqa: E402

SCORES, TAU = [1.5, -0.25, 0.75, 0.1], 0.5


class Scorer:
    """A cross-encoder by table: each pair's score is the number its passage says."""

    device = torch.device("cpu")

    def preprocess(self, pairs, prompt=None, task=None):
        return {"input": torch.tensor([float(passage) for _, passage in pairs])}

    def __call__(self, inputs):
        return {"scores": inputs["input"]}


def by_hand(positive: float, negatives: list[float]) -> float:
    f = [math.exp(score / TAU) for score in (positive, *negatives)]
    return -math.log(f[0] / sum(f))


def test_infonce_equals_the_printed_formula():
    found = infonce(torch.tensor(SCORES, dtype=torch.float64), torch.tensor([True, False, False, False]), TAU)
    assert found.tolist() == pytest.approx([by_hand(1.5, [-0.25, 0.75, 0.1])], abs=1e-6)


def test_each_positive_stands_against_the_negatives_alone():
    found = infonce(torch.tensor(SCORES, dtype=torch.float64), torch.tensor([True, False, True, False]), TAU)
    expected = [by_hand(1.5, [-0.25, 0.1]), by_hand(0.75, [-0.25, 0.1])]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_batch_weighs_every_positive_alike():
    batch = [
        RankingGroup("a", ("1.5", "0.75", "-0.25", "0.1"), (1.0, 1.0, 0.0, 0.0)),
        RankingGroup("b", ("0.5", "2.0"), (1.0, 0.0)),
    ]
    terms = [by_hand(1.5, [-0.25, 0.1]), by_hand(0.75, [-0.25, 0.1]), by_hand(0.5, [2.0])]
    assert float(compute_batch_loss(Scorer(), batch, TAU)) == pytest.approx(sum(terms) / 3, abs=1e-6)


def test_scores_that_are_no_numbers_stop_the_training():
    with pytest.raises(ModelError, match="produced NaN"):
        compute_batch_loss(Scorer(), [RankingGroup("a", ("nan", "1"), (1.0, 0.0))], 1.0)
