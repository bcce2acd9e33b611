"""The choice of gate, arbiter and threshold from out-of-fold predictions."""

import re
from dataclasses import replace

import numpy as np
import pytest

from knowgate.errors import BadInput
from knowgate.gates.calibration.threshold_choice import NetLoss, list_rate_thresholds
from knowgate.training.policy.choice import apply_policy, choose_policy
from knowgate.training.policy.folder import list_shown_results
from knowgate.training.policy.outcomes import ArbiterCandidate, ChoiceOptions, GateCandidate, GradedQuestions

N = 1000
FIRST_HALF = np.arange(N) < N // 2
EVERY = np.ones(N, dtype=bool)
RANDOM = np.random.default_rng(0)
SHUFFLED = RANDOM.permutation(N)


def make_gate(known, name="probe", **costs):
    return GateCandidate(name, np.where(known, 0.2, 0.8) + RANDOM.normal(0, 0.01, len(known)), **costs)


@pytest.mark.parametrize("arbiter", ["", "a", "b"])
@pytest.mark.parametrize("reference", ["", "a"])
def test_results_are_counts_of_single_questions(arbiter, reference):
    rng = np.random.default_rng(1)
    closed, opened, *taken = rng.random((4, 60)) < 0.5
    prefers_closed_book = dict(zip("ab", taken, strict=True))
    gate = GateCandidate("gate", rng.integers(0, 9, 60) / 8, models=2)
    arbiters = {name: ArbiterCandidate(name, taken) for name, taken in prefers_closed_book.items()}
    options = ChoiceOptions(price_search=0.25, price_llm_call=0.125, price_wrong=2.0)
    questions = GradedQuestions(closed, opened, {"gate": gate}, arbiters, options, reference)

    def answer(name, i):
        return closed[i] if name and prefers_closed_book[name][i] else opened[i]

    results = questions.evaluate_thresholds("gate", arbiter)
    assert [result.threshold for result in results] == list_rate_thresholds(gate.needs)
    for result in [*results, questions.evaluate("gate", arbiter, 0.5)]:  # 0.5 is also a need: not above, so skipped
        retrieved = [need > result.threshold for need in gate.needs]
        right = [answer(arbiter, i) if retrieved[i] else closed[i] for i in range(60)]
        for loss, other in ((result.loss, ""), (result.reference_loss, reference)):
            lost = sum(answer(other, i) and not right[i] for i in range(60))
            gained = sum(right[i] and not answer(other, i) for i in range(60))
            assert loss == NetLoss(lost, gained, 60)
        searches = sum(retrieved) / 60
        assert (result.searches, result.right) == (searches, sum(right) / 60)
        assert result.llm_calls == 1 + searches
        assert result.value == pytest.approx(sum(right) / 60 - (0.25 * searches + 0.125 * (1 + searches)) / 2)
        assert result.models == 2


def test_a_gate_that_knows_what_is_known_saves_half_of_the_searches_at_no_loss():
    known = FIRST_HALF[SHUFFLED]
    choice = choose_policy([make_gate(known)], known, EVERY)
    assert choice.chosen.name == "probe"
    assert choice.chosen.searches == pytest.approx(0.5, abs=0.03)
    assert choice.chosen.right >= 0.99
    assert choice.chosen.llm_calls == pytest.approx(1.5, abs=0.03)


def test_never_retrieving_is_chosen_if_both_answers_are_equally_good():
    right = RANDOM.random(N) < 0.8
    choice = choose_policy([make_gate(RANDOM.random(N) < 0.5)], right, right)
    assert choice.chosen.gate == "never"
    assert choice.chosen.searches == 0


def test_always_retrieving_is_chosen_if_the_gate_knows_nothing():
    known = FIRST_HALF[SHUFFLED]
    choice = choose_policy([GateCandidate("noise", RANDOM.random(N))], known, EVERY)
    assert choice.chosen.name == "always"
    assert choice.chosen.is_constant


def test_few_questions_prove_nothing_and_the_choice_says_how_many_would():
    known = FIRST_HALF[SHUFFLED][:60]
    choice = choose_policy([make_gate(known)], known, EVERY[:60])
    assert choice.chosen.name == "always"
    assert choice.required_rows is not None
    assert 80 <= choice.required_rows <= 110
    assert "always gives 100.0% right answers, this policy 100.0%" in choice.reason
    assert "(worst case, with 95% confidence: 4." in choice.reason
    assert "points less; at most 3 are allowed)" in choice.reason


def test_a_gate_that_loses_too_much_is_named_with_the_estimated_loss():
    known = FIRST_HALF[SHUFFLED]
    is_skipped = np.where(np.arange(N) % 20 == 0, ~known, known)  # five of a hundred questions are on the wrong side
    choice = choose_policy(
        [GateCandidate("coarse", np.where(is_skipped, 0.1, 0.9))], known, EVERY, options=ChoiceOptions(price_search=0.2)
    )
    assert choice.chosen.name == "always"
    assert re.search(r"coarse .*, always gives 100.0% .*: \d\.\d points less; at most 1 is allowed", choice.reason)
    assert choice.required_rows is None


def test_an_arbiter_that_corrects_answers_is_part_of_the_policy():
    known = FIRST_HALF[SHUFFLED]
    opened = ~known | (RANDOM.random(N) < 0.5)
    choice = choose_policy([], known, opened, [ArbiterCandidate("rules", known & ~opened)])
    assert choice.chosen.name == "always + rules"
    assert choice.chosen.right == 1.0
    assert choice.chosen.llm_calls == 2.0


def make_arbiter_case():
    """Half of the questions are skipped, which loses 35 answers; the rules arbiter gains 30 where everything is searched."""
    number = np.arange(N)[SHUFFLED]
    lost, gained = number < 35, (number >= 500) & (number < 530)
    closed, opened = ~lost & ((number < 500) | gained), ~gained
    gate = GateCandidate("gate", np.where(number < 500, 0.1, 0.9))
    return [gate], closed, opened, [ArbiterCandidate("rules", gained)]


def test_a_gate_may_not_lose_what_the_arbiter_gains_if_everything_is_searched():
    gates, closed, opened, arbiters = make_arbiter_case()
    options = ChoiceOptions(price_search=0.2)
    choice = choose_policy(gates, closed, opened, arbiters, options=options)
    assert choice.chosen.name == "always + rules"
    assert choice.constant.name == choice.reference.name == "always + rules"
    assert choice.chosen.right == pytest.approx(1.0)
    result = apply_policy(
        replace(choice.chosen, gate="gate", threshold=0.5),
        gates[0].needs,
        closed,
        opened,
        arbiters[0].prefers_closed_book,
        reference_prefers_closed_book=arbiters[0].prefers_closed_book,
    )
    assert (result.loss.mean, result.reference_loss.mean) == (pytest.approx(0.005), pytest.approx(0.035))
    assert options.accepts(result.loss)
    assert result.describe_violation(options, choice.reference.name) == (
        "always + rules gives 100.0% right answers, this policy 96.5%: 3.5 points less; at most 1 is allowed"
    )


def test_an_arbiter_whose_llm_calls_cost_more_than_it_gains_is_no_reference():
    gates, closed, opened, arbiters = make_arbiter_case()
    costly = ChoiceOptions(price_search=0.2, price_llm_call=0.05)
    choice = choose_policy(gates, closed, opened, arbiters, options=costly)
    assert choice.reference.name == "always"
    assert choice.chosen.gate == "gate"


def test_a_policy_is_not_rejected_for_losing_what_plain_always_does_not_have_either():
    gates, closed, opened, arbiters = make_arbiter_case()
    slightly_costly = ChoiceOptions(price_search=0.2, price_llm_call=0.031)  # the rules arbiter gains 0.03
    choice = choose_policy(gates, closed, opened, arbiters, options=slightly_costly)
    assert choice.constant.name == choice.reference.name == "always"
    assert (choice.chosen.gate, choice.chosen.searches) == ("gate", 0.5)


def test_a_policy_that_fails_on_questions_it_was_not_chosen_on_is_kept_with_its_figures():
    random = np.random.default_rng(5)
    known, opened = random.random(N) < 0.68, random.random(N) < 0.7
    choice = choose_policy([GateCandidate(f"noise {i}", random.random(N)) for i in range(10)], known, opened)
    assert choice.chosen.name == "always"
    assert choice.rejected.name.startswith("noise")
    loss = choice.rejected.result.loss
    assert loss.n == N
    assert choice.rejected.failure.endswith(f": {100 * loss.mean:.1f} points less; at most 1 is allowed")
    assert choice.rejected.result.right == pytest.approx(choice.always.right - loss.mean)
    assert list_shown_results(choice)[-1] == (
        f"rejected: {choice.rejected.name}, cross-validated",
        choice.rejected.result,
    )


@pytest.mark.parametrize("n_gates", [0, 3, 12])
def test_the_table_shows_the_choice_and_its_reference_in_at_most_ten_rows(n_gates):
    known = FIRST_HALF[SHUFFLED]
    opened = ~known | (np.arange(N) % 4 > 0)
    gates = [make_gate(known, f"gate {i}") for i in range(n_gates)]  # each is worth more than the reference
    for options in (ChoiceOptions(), ChoiceOptions(price_search=0.2, price_llm_call=0.2)):
        choice = choose_policy(gates, known, opened, [ArbiterCandidate("rules", known & ~opened)], options=options)
        rows = list_shown_results(choice)
        names = [name for name, _ in rows]
        assert {choice.chosen.name, choice.reference.name, "always", "never"} <= set(names)
        assert len(names) == len(set(names)) <= 10
        values = [result.value for name, result in rows[2:] if "cross-validated" not in name]
        assert values == sorted(values, reverse=True)


def test_the_simpler_of_two_equally_good_gates_is_chosen():
    known = FIRST_HALF[SHUFFLED]
    gate = make_gate(known, "large", models=4)
    choice = choose_policy([gate, GateCandidate("small", gate.needs, models=1)], known, EVERY)
    assert choice.chosen.gate == "small"


def test_a_high_price_of_llm_calls_favors_a_gate_that_reads_the_question_alone():
    known = FIRST_HALF[SHUFFLED]
    reads_draft, question_only = make_gate(known, "draft"), make_gate(known, "question", reads_draft=False, models=2)
    cheap = ChoiceOptions(price_llm_call=0.0)
    costly = ChoiceOptions(price_llm_call=0.05)
    assert choose_policy([reads_draft, question_only], known, EVERY, options=cheap).chosen.gate == "draft"
    assert choose_policy([reads_draft, question_only], known, EVERY, options=costly).chosen.gate == "question"


def test_the_estimate_of_a_gate_of_noise_is_not_better_than_always_retrieving():
    known, opened = RANDOM.random(N) < 0.5, RANDOM.random(N) < 0.7
    choice = choose_policy([GateCandidate(f"noise {i}", RANDOM.random(N)) for i in range(20)], known, opened)
    assert choice.estimate.value <= choice.always.value + 0.005


def test_a_chosen_policy_is_applied_to_other_questions():
    known = FIRST_HALF[SHUFFLED]
    choice = choose_policy([make_gate(known)], known, EVERY)
    result = apply_policy(choice.chosen, np.array([0.1, 0.9]), np.array([True, False]), np.array([False, True]))
    assert (result.searches, result.right, result.llm_calls) == (0.5, 1.0, 1.5)
    assert result.loss.gained == 1


def test_a_policy_with_an_arbiter_needs_its_choices():
    known = FIRST_HALF[SHUFFLED]
    choice = choose_policy([], known, ~known, [ArbiterCandidate("rules", known)])
    with pytest.raises(BadInput, match="prefers_closed_book"):
        apply_policy(choice.chosen, np.array([]), np.array([True]), np.array([True]))


def test_thresholds_lie_between_needs():
    assert list_rate_thresholds(np.array([0.0, 1.0, 1.0, 1.0])) == [0.5]
    assert list_rate_thresholds(np.array([0.3, 0.3])) == []


def test_predictions_must_be_numbers():
    with pytest.raises(BadInput, match="the scores of gate 'broken' contain NaN or infinity"):
        choose_policy([GateCandidate("broken", np.full(2, np.nan))], np.ones(2, dtype=bool), np.ones(2, dtype=bool))


@pytest.mark.parametrize(
    ("gained", "name"), [([0, 6, 2, 8], "always"), ([0, 6, 2, 8, 20, 26, 22, 28], "probe")], ids=["four", "eight"]
)
def test_a_gate_must_be_worth_more_than_always_retrieving_by_more_than_a_standard_error(gained, name):
    known = np.arange(N) % 2 == 0
    closed, opened = known.copy(), EVERY.copy()
    closed[[10, 16]] = False  # skipping loses two answers, and gains four or eight
    opened[gained] = False
    # In answers, the gain is 4 - 2 and its standard error the root of 4 + 2, which is 2.4; or 8 - 2 and 3.2.
    gate, options = GateCandidate("probe", np.where(known, 0.2, 0.8)), ChoiceOptions(price_search=0, price_llm_call=0)
    choice = choose_policy([gate], closed, opened, options=options)
    assert choice.chosen.name == name
    assert choice.chosen.is_constant == ("clearly worth more" in choice.reason)


def test_a_need_at_the_threshold_is_skipped():
    known = FIRST_HALF[SHUFFLED]
    chosen = choose_policy([make_gate(known)], known, EVERY).chosen
    result = apply_policy(chosen, np.array([chosen.threshold]), np.array([True]), np.array([False]))
    assert (result.searches, result.right) == (0.0, 1.0)


def test_a_setting_that_loses_too_much_is_not_tried_however_cheap_it_is():
    known = FIRST_HALF[SHUFFLED]
    gate = GateCandidate("noise", RANDOM.random(N))
    choice = choose_policy([gate], known, EVERY, options=ChoiceOptions(price_search=0.9))
    assert [result.gate for result in choice.tried] == ["always"]


def test_prices_count_in_proportion_to_the_price_of_a_wrong_answer():
    known = FIRST_HALF[SHUFFLED]
    gate = make_gate(known)
    cents = choose_policy(
        [gate], known, EVERY, options=ChoiceOptions(price_search=5, price_llm_call=0.5, price_wrong=100)
    )
    default = choose_policy([gate], known, EVERY)
    assert cents.chosen.value == pytest.approx(default.chosen.value)
