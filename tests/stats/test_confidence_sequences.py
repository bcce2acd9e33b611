"""Confidence sequences and tests that may be looked at after each number: values by hand, coverage by simulation."""

import copy
import math
import random

import numpy as np
import pytest

from knowgate.errors import KnowgateError
from knowgate.stats.confidence_sequences import LAMBDAS, PSI, GuaranteeTest, GuaranteeTests, MeanConfidenceSequence
from tests.support.params import also_slow

DELTA, DAYS, A_DAY = 0.05, 500, 200  # quiet days, each with so many audited questions


def filled(values, **options):
    bounds = MeanConfidenceSequence(**options)
    for value in values:
        bounds.add(value)
    return bounds


def broke_after(values, promised, delta=DELTA):
    """How many numbers it took; None if it never came to that."""
    test = GuaranteeTest(promised, delta)
    for count, value in enumerate(values, 1):
        test.add(value)
        if test.is_violated:
            return count
    return None


# --- bounds of a mean -----------------------------------------------------------------------------


def test_bounds_without_observations_are_zero_and_one():
    bounds = MeanConfidenceSequence()
    assert (bounds.mean, bounds.low, bounds.high) == (None, 0.0, 1.0)


def test_the_upper_bound_of_zeros_equals_the_value_worked_out_by_hand():
    bounds = filled([0] * 100)
    spread = sum((0.5 / (1 + n)) ** 2 for n in range(100))
    m = bounds.high  # the mixture is exactly 2 / delta there
    mixture = np.mean(np.exp(LAMBDAS * 100 * m - PSI * spread))
    assert mixture == pytest.approx(2 / DELTA, rel=1e-6)
    assert (bounds.low, bounds.mean) == (0.0, 0.0)


def test_bounds_of_mirrored_values_are_mirrored():
    values = np.random.default_rng(0).random(50)
    one, other = filled(values), filled(1 - values)
    assert (one.low, one.high) == pytest.approx((1 - other.high, 1 - other.low))


def test_bounds_converge_to_the_mean():
    values = np.random.default_rng(1).binomial(1, 0.1, 20_000)
    bounds = filled(values)
    assert bounds.high - bounds.low < 0.025
    assert bounds.low < 0.1 < bounds.high


@pytest.mark.parametrize("mean", [also_slow(0.01), 0.1, also_slow(0.5)])
def test_bounds_hold_at_all_times_in_almost_all_simulations(mean):
    rng, missed = np.random.default_rng(2), 0
    for _ in range(100):
        bounds = MeanConfidenceSequence(DELTA)
        for value in rng.binomial(1, mean, A_DAY):
            bounds.add(float(value))
            if bounds._is_excluded(bounds.total, mean) or bounds._is_excluded(bounds.n - bounds.total, 1 - mean):
                missed += 1
                break
    assert missed <= 100 * DELTA


def test_bounds_hold_for_the_running_mean_if_the_mean_changes():
    rng, missed = np.random.default_rng(3), 0
    means = np.concatenate([np.full(200, 0.02), np.full(200, 0.4)])
    for _ in range(50):
        bounds = MeanConfidenceSequence(DELTA)
        for value, so_far in zip(rng.binomial(1, means), np.cumsum(means) / np.arange(1, 401), strict=True):
            bounds.add(float(value))
            if bounds._is_excluded(bounds.total, so_far) or bounds._is_excluded(bounds.n - bounds.total, 1 - so_far):
                missed += 1
                break
    assert missed <= 50 * DELTA


# --- a promise ------------------------------------------------------------------------------------


def test_evidence_starts_at_one_and_stays_there_on_average_at_the_limit():
    """The mean of the next evidence, over a coin of the promised share, is the evidence now: worked out exactly."""
    promised, shares = 0.2, {1.0: 0.2, 0.0: 0.8}
    following = []
    for first in shares:
        for second in shares:
            test = GuaranteeTest(promised)
            test.add(first)
            test.add(second)
            following.append(shares[first] * shares[second] * test.evidence)
    assert GuaranteeTest(promised).evidence == 1.0
    assert sum(following) == pytest.approx(1.0)


def test_a_violated_guarantee_stays_violated():
    test = GuaranteeTest(0.02)
    for value in [1] * 10 + [0] * 500:
        test.add(value)
    assert (test.is_violated, test.evidence_share) == (True, 1.0)
    assert test.evidence < 1


@pytest.mark.parametrize("loss", [also_slow(0.0), also_slow(0.01), 0.02])
def test_there_are_almost_no_false_alarms_in_500_simulations(loss):
    rng = np.random.default_rng(4)
    days = [broke_after(rng.binomial(1, loss, A_DAY).astype(float), promised=0.02) for _ in range(DAYS)]
    assert sum(day is not None for day in days) <= DELTA * DAYS


def test_fractional_losses_give_no_false_alarms():
    rng = np.random.default_rng(5)
    days = [broke_after(rng.beta(0.2, 9.8, A_DAY), promised=0.02) for _ in range(DAYS)]
    assert sum(day is not None for day in days) <= DELTA * DAYS


@pytest.mark.parametrize(("loss", "within"), [also_slow(0.1, 160), (0.3, 40), also_slow(1.0, 6)])
def test_a_violation_after_a_long_good_time_is_detected_soon(loss, within):
    rng, taken = np.random.default_rng(6), []
    for _ in range(40):
        quiet, drifted = rng.binomial(1, 0.01, 2_000), rng.binomial(1, loss, 3_000)
        found = broke_after(np.concatenate([quiet, drifted]).astype(float), promised=0.02)
        assert found is not None
        taken.append(found - 2_000)
    assert np.median(taken) <= within


def test_invalid_values_are_rejected():
    with pytest.raises(KnowgateError, match="between 0 and 1"):
        MeanConfidenceSequence().add(1.5)
    with pytest.raises(KnowgateError, match="between 0 and 1"):
        GuaranteeTest(0.1).add(math.nan)
    with pytest.raises(KnowgateError, match="limit=0 is not allowed"):
        GuaranteeTest(0)
    with pytest.raises(KnowgateError, match="delta=1 is not allowed"):
        MeanConfidenceSequence(1)


def test_many_tests_at_once_give_the_same_results_as_single_ones():
    generator = random.Random(1)
    everything, together, single = GuaranteeTest(0.05), GuaranteeTests(), []
    numbers_of_violated = set()
    for step in range(400):
        if step % 40 == 0:  # a new copy starts with what all have seen so far
            together.append(everything)
            single.append(copy.deepcopy(everything))
        value, exception = float(generator.random() < 0.1), generator.randrange(len(single))
        everything.add(value)
        together.add(value, everything, exception)
        for number, test in enumerate(single):
            if number != exception:
                test.add(value)
        assert together.are_violated.tolist() == [test.is_violated for test in single]
        if not together.are_violated.all():
            assert together._capital == pytest.approx(np.array([test.capital for test in single]))
        numbers_of_violated.add(sum(test.is_violated for test in single))
    assert len(numbers_of_violated) > 2  # they do not end together
