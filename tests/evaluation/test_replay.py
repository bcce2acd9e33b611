"""What thresholds save and risk on logged traffic, worked out by hand on a handful of questions."""

import math
from dataclasses import replace

import pytest

from knowgate.errors import BadSetting
from knowgate.evaluation.cost import compare_traffic_costs
from knowgate.evaluation.replay import (
    EventCost,
    Prices,
    SavedAmount,
    Traffic,
    TrafficEvent,
    replay_traffic,
)
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.proportions import estimate_proportion

READ, CLOSED_BOOK, OPEN_BOOK = EventCost(1.0, 10.0, 2.0), EventCost(0.5, 0.0, 4.0), EventCost(3.0, 100.0, 5.0)


def event(need, retrieved=None, loses=None, **costs):
    return TrafficEvent(
        need,
        retrieved,
        **{"decision_cost": READ, "cost_if_skipped": CLOSED_BOOK, "cost_if_retrieved": OPEN_BOOK, **costs},
        loses_answer=loses,
    )


def line(events, threshold, prices=None):
    return replay_traffic(Traffic(events), [threshold], prices or Prices())[0]


def test_needs_at_or_below_the_threshold_are_skipped():
    result = line([event(0.2), event(0.5), event(0.7), event(0.9)], 0.5)
    assert (result.retrieved, result.rate) == (2, 0.5)
    assert result.savings["retrievals"] == SavedAmount(2, 4)


def test_skipping_saves_the_open_book_answer_and_pays_for_the_reading():
    # always: 2 * 3 s. gated: 2 * 1 s reading, 3 s for the one looked up, 0.5 s for the one skipped
    result = line([event(0.2), event(0.8)], 0.5)
    assert result.savings["seconds"] == SavedAmount(6 - 5.5, 6)
    # always: 2 * 105. gated: 2 * 12 + 105 + 4
    assert result.savings["tokens"] == SavedAmount(210 - 133, 210)


def test_a_gate_that_never_skips_costs_its_reading():
    result = line([event(0.8), event(0.9)], 0.5)
    assert result.savings["seconds"] == SavedAmount(-2, 6)


def test_money_is_searches_and_tokens_at_their_prices():
    prices = Prices(search=1.0, input_token=0.01, output_token=0.1)
    result = line([event(0.2), event(0.8)], 0.5, prices)
    # searches 1; prompt tokens 200 - (20 + 100 + 0) = 80; written 10 - (4 + 5 + 4) = -3
    assert result.savings["money"].saved == pytest.approx(1 + 0.8 - 0.3)
    assert result.savings["money"].always == pytest.approx(2 + 2 + 1)


def test_a_second_llm_call_for_each_draft_that_is_retrieved_is_subtracted_from_the_money():
    events = [replace(event(need), has_draft=True) for need in (0.1, 0.2, 0.3, 0.8)]
    result = line(events, 0.5, Prices(search=0.005, llm_call=0.002))
    assert result.savings["llm_calls"] == SavedAmount(-1, 4)
    assert result.savings["money"].saved == pytest.approx(3 * 0.005 - 1 * 0.002)
    assert result.savings["money"].always == pytest.approx(4 * 0.007)


def test_a_search_that_began_before_the_decision_is_not_saved():
    events = [replace(event(need), is_searched_early=True) for need in (0.1, 0.2, 0.8)]
    result = line(events, 0.5, Prices(search=0.005))
    assert result.savings["retrievals"] == SavedAmount(0, 3)
    assert result.savings["money"].saved == 0
    assert result.retrieved == 1


def test_a_separate_draft_is_an_extra_call_for_every_question():
    events = [replace(event(need), has_draft=False, extra_calls=1.0) for need in (0.1, 0.2, 0.3, 0.8)]
    assert line(events, 0.5).savings["llm_calls"] == SavedAmount(-4, 4)


@pytest.mark.parametrize("prices", [{"llm_call": 0.3}, {"token": 0.01}, {"gpu_hour": 5.0}])
def test_replay_and_cost_give_the_same_money(prices):
    prices = Prices(search=0.2, **prices)
    costs = {
        "decision_cost": EventCost(1.0, 10.0, 2.0, 7.0),
        "cost_if_skipped": EventCost(0.5, 0.0, 4.0, 8.0),
        "cost_if_retrieved": EventCost(3.0, 100.0, 5.0, 9.0),
    }
    traffic = Traffic([event(need, **costs) for need in (0.1, 0.6, 0.9)])
    cost = compare_traffic_costs(traffic, 0.5, prices)
    saved = replay_traffic(traffic, [0.5], prices)[0].savings["money"].saved
    assert saved == pytest.approx(3 * (cost.always.money(prices) - cost.gated.money(prices)))


def test_money_is_unknown_if_calls_have_a_price_and_nobody_knows_whether_there_were_drafts():
    assert line([TrafficEvent(0.2, False)], 0.5, Prices(search=2.0, llm_call=1.0)).savings["money"] is None


def test_unknown_costs_are_replaced_by_the_mean():
    events = [
        event(0.2, False, cost_if_retrieved=EventCost()),
        event(0.8, True, cost_if_retrieved=EventCost(2.0)),
        event(0.9, True, cost_if_retrieved=EventCost(4.0)),
    ]
    seconds = line(events, 0.5).savings["seconds"]
    assert (seconds.saved, seconds.always) == (pytest.approx(9 - (3 + 0.5 + 2 + 4)), 9)
    assert Traffic(events).count_known("cost_if_retrieved") == 2


def test_savings_are_unknown_if_nothing_is_recorded():
    result = line([event(0.2, False, cost_if_retrieved=EventCost())], 0.5, Prices(input_token=1.0))
    assert (result.savings["seconds"], result.savings["tokens"], result.savings["money"]) == (None, None, None)


def test_searches_have_a_price_even_if_tokens_are_unknown():
    assert line([TrafficEvent(0.2, False)], 0.5, Prices(search=2.0)).savings["money"] == SavedAmount(2, 2)


def test_risk_is_the_share_of_all_questions_that_are_skipped_and_answered_differently():
    audited = [event(0.2, False, number < 30) for number in range(150)]  # 20 % of the skipped questions differ
    skipped = [event(0.2, False)] * 150
    searched = (
        [event(0.6, True, number < 50) for number in range(100)] + [event(0.6, True)] * 100 + [event(0.9, True)] * 500
    )
    decided_by_rules = [event(-math.inf, False)] * 70 + [event(math.inf, True)] * 30
    events = [*audited, *skipped, *searched, *decided_by_rules]
    nothing, used, higher = replay_traffic(Traffic(events), [0.1, 0.5, 0.7], Prices())
    assert nothing.risk == Estimate(0.0, 0.0, 0.0)
    assert used.risk.value == pytest.approx(0.2 * 300 / 1000)
    assert used.risk.high == pytest.approx(estimate_proportion([True] * 30 + [False] * 120).high * 300 / 1000)
    assert higher.risk.value == pytest.approx(0.2 * 300 / 1000 + 0.5 * 200 / 1000)
    assert 0 < higher.risk.low < higher.risk.value < higher.risk.high < 1


def test_the_risk_has_an_interval_if_enough_answers_are_known():
    events = [event(0.6, True, number < 30) for number in range(120)]
    result = line(events, 0.75)
    assert (result.known, result.has_evidence, result.risk.value) == (120, True, 0.25)
    assert 0 < result.risk.low < 0.25 < result.risk.high < 1


def test_failed_audits_may_have_found_kept_or_lost_answers():
    audited = [event(0.2, False, number < 10) for number in range(120)]
    failed = [event(0.2, False, audit_failed=True)] * 30
    risk = line(audited + failed, 0.5).risk
    assert risk.value == pytest.approx(10 / 120)
    assert risk.low == estimate_proportion([True] * 10 + [False] * 140).low
    assert risk.high == estimate_proportion([True] * 40 + [False] * 110).high


def test_the_risk_is_unknown_if_few_answers_are_known():
    result = line([event(0.2, False, False)] * 99, 0.5)
    assert (result.known, result.has_evidence, result.risk.value) == (99, False, None)


def test_the_risk_of_a_threshold_that_nobody_has_tried_is_unknown():
    # Audits know what was skipped, but nothing about the questions that only the higher threshold would skip.
    events = [event(0.2, False, False)] * 150 + [event(0.7, True, None)] * 150
    tried, untried = line(events, 0.5), line(events, 0.8)
    assert (tried.has_evidence, tried.risk.value) == (True, 0.0)
    assert (untried.has_evidence, untried.risk.value) == (False, None)


def test_the_risk_is_unknown_if_no_skipped_question_was_audited():
    events = [event(0.2, False, None)] * 150 + [event(0.7, True, False)] * 150
    assert line(events, 0.8).risk.value is None


def test_the_risk_on_a_label_run_is_always_known():
    assert line([event(0.2, None, True), event(0.9, None, False)], 0.5).risk.value == 0.5


def test_thresholds_are_distinct_and_sorted():
    assert [result.threshold for result in replay_traffic(Traffic([event(0.5)]), [0.9, 0.1, 0.9], Prices())] == [
        0.1,
        0.9,
    ]


def test_always_retrieving_is_a_threshold_too():
    assert line([event(0.0)], -1.0).rate == 1.0


@pytest.mark.parametrize("price", [-1.0, math.inf, math.nan])
def test_a_price_must_be_a_finite_number_of_at_least_0(price):
    with pytest.raises(BadSetting, match="input_token="):
        Prices(input_token=price)
