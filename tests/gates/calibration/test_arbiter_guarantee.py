"""The promises of a cascade, in both forms: counted by hand, by brute force, and in 500 simulated calibrations."""

import math

import numpy as np
import pytest

from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.calibration.guarantee import (
    compute_net_p_value,
    compute_required_rows,
    learn_then_test,
)
from knowgate.gates.calibration.threshold_choice import (
    GateOutcomes,
    choose_for_accuracy,
    count_gained,
    count_harmed,
    evaluate_threshold,
)
from tests.support.params import also_slow

TIMES = 500


def bools(text):
    return np.array([char == "1" for char in text])


# needs .1 .3 .5 .7: the arbiter harms the second, gains the third
FOUR = GateOutcomes(np.array([0.1, 0.3, 0.5, 0.7]), bools("0011"), bools("1101"), bools("1011"))


# --- counted by hand ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "right", "harmed", "gained"),
    [(ALWAYS_RETRIEVE, 3, 1, 1), (0.1, 2, 2, 1), (0.3, 2, 2, 1), (1.0, 2, 2, 1)],
)
def test_a_threshold_with_an_arbiter_gives_the_counts_worked_out_by_hand(threshold, right, harmed, gained):
    found = evaluate_threshold(FOUR, threshold)
    assert (found.right, found.harmed, found.gained, found.right_always) == (right, harmed, gained, 3)
    assert found.right_chosen == 3
    assert count_harmed(FOUR, np.array([threshold])) == [harmed]
    assert count_gained(FOUR, np.array([threshold])) == [gained]


def test_questions_harmed_by_the_arbiter_are_harmed_by_skipping():
    assert (FOUR.harmed_if_retrieved <= FOUR.harmed_if_skipped).all()


def test_without_an_arbiter_the_answer_after_retrieval_is_the_open_book_one():
    plain = GateOutcomes(FOUR.needs, FOUR.closed_book_right, FOUR.open_book_right)
    assert (plain.retrieved_right == plain.open_book_right).all()
    assert evaluate_threshold(plain, 0.3).right_chosen is None


def test_the_best_accuracy_is_that_of_the_cascade():
    needs = np.array([0.1, 0.2, 0.3, 0.4])
    closed, opened = bools("1100"), bools("0011")
    assert choose_for_accuracy(GateOutcomes(needs, closed, opened)) == 0.25
    assert (
        choose_for_accuracy(GateOutcomes(needs, closed, opened, bools("1111"))) == 0.25
    )  # of equals, what retrieves least
    assert choose_for_accuracy(GateOutcomes(needs, bools("0000"), opened, bools("1011"))) == ALWAYS_RETRIEVE


# --- the p-value of a net loss --------------------------------------------------------------------


def brute_force(lost, gained, n, epsilon, share):
    """Every outcome of n questions, one by one."""
    total, up, down = 0.0, (share + epsilon) / 2, (share - epsilon) / 2
    for a in range(n + 1):
        for b in range(n + 1 - a):
            if a - b <= lost - gained:
                ways = math.factorial(n) // (math.factorial(a) * math.factorial(b) * math.factorial(n - a - b))
                total += ways * up**a * down**b * (1 - share) ** (n - a - b)
    return total


@pytest.mark.parametrize(("lost", "gained", "n", "epsilon"), [(0, 0, 20, 0.1), (1, 3, 25, 0.05), (2, 0, 30, 0.2)])
def test_the_net_p_value_is_the_maximum_over_plausible_shares(lost, gained, n, epsilon):
    from scipy.stats import beta

    spent = 0.02 * 0.1
    limit = beta.ppf(1 - spent, lost + gained + 1, n - lost - gained)
    shares = np.linspace(epsilon, max(limit, epsilon), 7)
    expected = max(brute_force(lost, gained, n, epsilon, float(share)) for share in shares) + spent
    assert compute_net_p_value(lost, gained, n, epsilon, 0.1) == pytest.approx(min(1.0, expected))


def test_answers_gained_make_up_for_answers_lost():
    assert compute_net_p_value(30, 30, 1000, 0.03, 0.05) < 0.05 < compute_net_p_value(30, 5, 1000, 0.03, 0.05)
    assert compute_net_p_value(60, 30, 1000, 0.03, 0.05) > 0.3


def test_the_required_rows_for_a_net_loss_are_those_of_the_first_test():
    n = compute_required_rows(0.05, 0.1, "net")
    assert compute_net_p_value(0, 0, n, 0.05, 0.1) <= 0.1 < compute_net_p_value(0, 0, n - 1, 0.05, 0.1)


# --- simulated ------------------------------------------------------------------------------------


def cascade(n, seed, *, takes=0.3):
    """Need is uniform. From memory right with 0.9 - 0.8 need, with passages 0.6; the arbiter takes the answer from
    memory where the two differ with probability `takes`, and twice as readily where that one is right."""
    rng = np.random.default_rng(seed)
    needs = rng.uniform(size=n)
    closed, opened = rng.uniform(size=n) < 0.9 - 0.8 * needs, rng.uniform(size=n) < 0.6
    memory = rng.uniform(size=n) < np.where(closed, 2 * takes, takes)
    return GateOutcomes(needs, closed, opened, np.where(memory, closed, opened))


def true_rates(thresholds, *, takes=0.3):
    """(harm, net loss) of each threshold, from half a million questions."""
    whole = cascade(500_000, 99, takes=takes)
    harmed, gained = (count(whole, np.array(thresholds)) / 500_000 for count in (count_harmed, count_gained))
    return harmed, harmed - gained


@pytest.mark.parametrize(
    ("form", "epsilon", "delta"), [("harm", 0.2, 0.1), ("net", 0.05, 0.1), also_slow("net", 0.02, 0.05)]
)
def test_500_calibrations_break_the_guarantee_no_more_often_than_allowed(form, epsilon, delta):
    grid = np.concatenate([[ALWAYS_RETRIEVE], np.arange(41) / 40])
    found = [learn_then_test(cascade(400, seed), epsilon, delta, grid, form) for seed in range(TIMES)]
    proven = np.array([one.proven for one in found])
    harm, net = true_rates([one.threshold for one in found])
    broken = proven & ((harm if form == "harm" else net) > epsilon)
    assert broken.mean() <= delta + 3 * np.sqrt(delta * (1 - delta) / TIMES)
    assert proven.mean() > 0.5
    assert broken.any()  # not by being timid: the promise is used up


def test_a_net_loss_allows_far_more_skipping_than_harm_alone():
    harm, net = (learn_then_test(cascade(2000, 0), 0.15, 0.1, form=form).threshold for form in ("harm", "net"))
    assert net > harm + 0.2


def test_an_arbiter_that_harms_too_much_leaves_nothing_to_prove():
    found = learn_then_test(cascade(400, 0), 0.01, 0.1)
    assert (found.threshold, found.proven) == (ALWAYS_RETRIEVE, False)
