import numpy as np
import pytest
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score

from knowgate.fitting import metrics
from knowgate.statistics import measures as weighted
from knowgate.statistics.measures import Ranked


def drawn(n=400, seed=0, digits=None):
    """Needs (with ties if rounded) and outcomes that follow them loosely."""
    rng = np.random.default_rng(seed)
    needs = rng.random(n)
    needed = rng.random(n) < 0.2 + 0.6 * needs
    return needed, (needs if digits is None else needs.round(digits))


def measures(needed, needs, weights):
    ranked = Ranked(needs)
    drawn = ranked.sorted(weights)
    return {"auroc": ranked.auroc(drawn, needed), **ranked.precision_and_risk(drawn, needed)}


def ones(n):
    return np.ones((1, n), dtype=np.float32)


@pytest.mark.parametrize("digits", [None, 1])
def test_measures_of_rank_equal_scikit_learns(digits):
    needed, needs = drawn(digits=digits)
    found = measures(needed, needs, ones(len(needs)))
    assert found["auroc"][0] == pytest.approx(roc_auc_score(needed, needs), abs=1e-6)
    assert found["auprc"][0] == pytest.approx(average_precision_score(needed, needs), abs=1e-6)


def test_brier_and_ece_equal_their_plain_forms():
    needed, needs = drawn()
    assert weighted.weighted_brier(ones(400), needed, needs)[0] == pytest.approx(
        brier_score_loss(needed, needs), abs=1e-6
    )
    assert weighted.weighted_ece(ones(400), needed, needs)[0] == pytest.approx(metrics.ece(needed, needs), abs=1e-6)


def test_a_weight_of_two_is_the_question_twice():
    needed, needs = drawn(50, digits=1)
    counts = np.random.default_rng(1).integers(0, 4, 50)
    twice = np.repeat(np.arange(50), counts)
    by_weight = measures(needed, needs, counts[None, :].astype(np.float32))
    by_rows = measures(needed[twice], needs[twice], ones(len(twice)))
    assert {name: value[0] for name, value in by_weight.items()} == pytest.approx(
        {name: value[0] for name, value in by_rows.items()}, abs=1e-6
    )


def test_the_area_under_risk_and_coverage_by_hand():
    # least need first: right, wrong, wrong -> risks 0, 1/2, 2/3
    found = measures(np.array([False, True, True]), np.array([0.1, 0.2, 0.3]), ones(3))
    assert found["aurc"][0] == pytest.approx((0 + 1 / 2 + 2 / 3) / 3)


def test_with_one_kind_of_question_there_is_no_rank_to_measure():
    found = measures(np.array([True, True]), np.array([0.1, 0.2]), ones(2))
    assert np.isnan(found["auroc"][0])
