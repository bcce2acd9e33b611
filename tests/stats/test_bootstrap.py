"""One way of drawing and one record of a value with its interval, whatever is measured."""

import numpy as np
import pytest

from knowgate.errors import BadInput
from knowgate.stats import bootstrap
from knowgate.stats import metrics as measures
from knowgate.stats.bootstrap import (
    QUALITY_METRICS,
    Bootstrap,
    Estimate,
    estimate_auroc,
    estimate_mean,
    estimate_means,
    estimate_quality,
    summarize_resamples,
)
from knowgate.stats.metrics import auroc, weighted_ece, weighted_mean


def outcomes(n):
    rng = np.random.default_rng(0)
    needs = rng.random(n)
    return rng.random(n) < needs, needs


# --- drawing --------------------------------------------------------------------------------------


def test_every_resample_draws_as_many_questions_as_there_are():
    draws = Bootstrap(7, resamples=600)
    weights = [np.concatenate(list(draws.iter_weight_blocks(number))) for number in range(1, draws.n_portions)]
    assert sum(len(part) for part in weights) == 600
    assert all((part.sum(axis=1) == 7).all() for part in weights)


def test_the_first_value_is_that_of_the_original_sample():
    values = np.array([0.0, 1.0, 5.0])
    (found,) = Bootstrap(3, resamples=10).apply([lambda weights: {"mean": weighted_mean(weights, values)}])
    assert (found["mean"][0], len(found["mean"])) == (2.0, 11)


def test_metrics_on_the_same_number_of_questions_share_resamples():
    """The same draws: the difference of a measure and itself is 0 in every resample."""
    values = np.random.default_rng(0).random(40)

    def mean(weights):
        return {"mean": weighted_mean(weights, values)}

    first, second = (Bootstrap(40, resamples=30).apply([mean])[0]["mean"] for _ in range(2))
    assert (first - second == 0).all()


# --- estimates ------------------------------------------------------------------------------------


def test_an_estimate_has_the_original_value_and_the_95_percent_interval():
    found = summarize_resamples(np.array([0.5, *np.arange(1001) / 1000]))
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.025, 0.975))


def test_resamples_in_which_a_measure_is_not_defined_are_left_out():
    assert summarize_resamples(np.array([0.5, np.nan, 0.4, 0.4])) == Estimate(0.5, 0.4, 0.4)
    assert summarize_resamples(np.array([np.nan, 0.4])).format() == "not defined"


def test_the_interval_of_a_coin_is_about_the_normal_one():
    found = estimate_mean(np.array([1.0, 0.0] * 200))
    half = 1.96 * 0.5 / np.sqrt(400)
    assert found.value == 0.5
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.006)


def test_a_paired_interval_is_narrower_than_unpaired_ones():
    rng = np.random.default_rng(0)
    hard = rng.random(200)
    better = np.clip(hard + 0.05 + 0.01 * rng.standard_normal(200), 0, None)
    gain, spread = estimate_mean(better - hard), estimate_mean(hard)
    assert gain.low > 0.045
    assert gain.high < 0.055
    assert spread.high - spread.low > 0.06


def test_a_mean_of_nothing_is_an_error():
    with pytest.raises(BadInput, match="no question"):
        estimate_mean(np.array([]))


# --- the quality of needs -------------------------------------------------------------------------


def test_quality_has_the_plain_measures_as_values():
    needed, needs = outcomes(300)
    found = estimate_quality(needed, needs, resamples=5)
    assert tuple(found) == QUALITY_METRICS
    assert found["auroc"].value == auroc(needed, needs)
    assert found["brier"].value == pytest.approx(np.mean((needs - needed) ** 2), abs=1e-12)


def test_metrics_are_undefined_with_one_kind_of_question():
    found = estimate_quality(np.array([True, True]), np.array([0.2, 0.9]))
    assert found["auroc"].value is None
    assert found["brier"].value == pytest.approx((0.64 + 0.01) / 2)


def test_no_estimate_is_defined_without_questions():
    assert set(estimate_quality(np.empty(0, dtype=bool), np.empty(0)).values()) == {Estimate(None)}
    assert estimate_auroc(np.empty(0, dtype=bool), np.empty(0)) == Estimate(None)


def test_estimate_auroc_equals_estimate_quality():
    rng = np.random.default_rng(3)
    needed, needs = rng.random(50) < 0.4, rng.random(50).round(1)
    assert estimate_auroc(needed, needs, 30) == estimate_quality(needed, needs, 30)["auroc"]


def test_intervals_hold_the_value_and_shrink_with_more_rows():
    needed, needs = outcomes(2000)
    wide, narrow = (estimate_quality(needed[:n], needs[:n], resamples=100)["brier"] for n in (100, 2000))
    assert wide.low < wide.value < wide.high
    assert narrow.low < narrow.value < narrow.high
    assert (narrow.high - narrow.low) < (wide.high - wide.low) / 2


def test_estimate_means_equals_estimate_mean_of_each_column():
    from knowgate.stats.bootstrap import Estimate, estimate_mean, estimate_means

    rng = np.random.default_rng(0)
    first, second, short = rng.random(40), rng.random(40), rng.random(7)
    holed = np.where(np.arange(40) % 4 == 0, np.nan, first)
    together = estimate_means([first, second, short, holed, np.full(3, np.nan)], 200)
    alone = [estimate_mean(values, 200) for values in (first, second, short, holed[~np.isnan(holed)])]
    assert together == [*alone, Estimate(None)]


# --- very many questions --------------------------------------------------------------------------


def test_resamples_do_not_depend_on_the_block_size(monkeypatch):
    draws = Bootstrap(11, resamples=300)
    whole = [np.concatenate(list(draws.iter_weight_blocks(number))) for number in range(draws.n_portions)]
    monkeypatch.setattr(bootstrap, "LARGE_SAMPLE", 10)
    monkeypatch.setattr(bootstrap, "MAX_COUNTS_IN_MEMORY", 40)
    pieces = [list(draws.iter_weight_blocks(number)) for number in range(draws.n_portions)]
    assert max(len(piece) for piece in pieces[1]) == 3
    assert all((np.concatenate(some) == one).all() for some, one in zip(pieces, whole, strict=True))


def test_the_original_sample_can_be_left_out():
    values = np.random.default_rng(0).random(40)

    def mean(weights):
        return {"mean": weighted_mean(weights, values)}

    draws = Bootstrap(40, resamples=30)
    assert draws.apply([mean], with_original=False)[0]["mean"].tolist() == draws.apply([mean])[0]["mean"][1:].tolist()
    assert Bootstrap(40, resamples=0).apply([mean], with_original=False) == [{}]


def test_means_of_large_samples_have_the_same_interval():
    values = np.random.default_rng(0).choice([-1.0, 0.0, 1.0], 30_000, p=[0.1, 0.8, 0.1])
    found, half = estimate_mean(values), 1.96 * values.std() / np.sqrt(len(values))
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=half / 5)
    assert found.high == pytest.approx(values.mean() + half, abs=half / 5)
    assert estimate_means([values, values[:100]], 50)[0] == estimate_mean(values, 50)


def test_ece_does_not_depend_on_the_block_size(monkeypatch):
    needed, needs = outcomes(1_000)
    weights = np.random.default_rng(1).poisson(1, (3, 1_000)).astype(np.float64)
    whole = weighted_ece(weights, needed, needs)
    monkeypatch.setattr(measures, "ECE_BLOCK_SIZE", 64)
    assert weighted_ece(weights, needed, needs) == pytest.approx(whole, abs=1e-12)
