from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from knowgate.errors import ModelError  # noqa: E402
from knowgate.training.reranker_trainer import GroupLoss, infonce, listwise  # noqa: E402

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


def test_listwise_is_the_cross_entropy_between_shifts_of_unit_spread_and_scores():
    shifts = [0.2, -0.1, 0.05, -0.15]
    mean = sum(shifts) / 4
    spread = math.sqrt(sum((shift - mean) ** 2 for shift in shifts) / 4)
    wanted = [math.exp(shift / spread / TAU) for shift in shifts]
    given = [math.exp(score) for score in SCORES]
    expected = -sum(w / sum(wanted) * math.log(g / sum(given)) for w, g in zip(wanted, given, strict=True))
    found = listwise(torch.tensor(SCORES, dtype=torch.float64), torch.tensor(shifts, dtype=torch.float64), TAU)
    assert float(found) == pytest.approx(expected, abs=1e-6)


def test_a_batch_weighs_every_positive_alike():
    loss = GroupLoss(Scorer(), "infonce", TAU)
    groups = [["1.5", "0.75", "-0.25", "0.1"], ["0.5", "2.0"]]
    labels = [torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0])]
    terms = [by_hand(1.5, [-0.25, 0.1]), by_hand(0.75, [-0.25, 0.1]), by_hand(0.5, [2.0])]
    assert float(loss(["a", "b"], groups, labels)) == pytest.approx(sum(terms) / 3, abs=1e-6)


def test_a_listwise_batch_is_the_mean_of_its_groups():
    loss = GroupLoss(Scorer(), "listwise", 1.0)
    labels = [torch.tensor([0.3, -0.1]), torch.tensor([0.0, 0.5])]
    expected = [
        listwise(torch.tensor(s), label, 1.0) for s, label in zip([[1.0, 2.0], [0.0, 1.0]], labels, strict=True)
    ]
    assert float(loss(["a", "b"], [["1", "2"], ["0", "1"]], labels)) == pytest.approx(
        float(sum(expected)) / 2, abs=1e-6
    )


def test_scores_that_are_no_numbers_stop_the_training():
    with pytest.raises(ModelError, match="gave NaN"):
        GroupLoss(Scorer(), "infonce", 1.0)(["a"], [["nan", "1"]], [torch.tensor([1.0, 0.0])])
