"""What always, never and gated retrieval cost: sums worked out by hand."""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from knowgate.errors import BadInput, BadSetting
from knowgate.evaluation.cost import (
    CostAssumptions,
    CostComparison,
    compare_traffic_costs,
    describe_prices,
    read_prices,
)
from knowgate.evaluation.replay import EventCost, PolicyCost, Prices, Traffic, TrafficEvent
from knowgate.evaluation.server_log import read_server_log

# Four questions; the gate drafts 2 tokens of each. Retrieved: 100 tokens read, 5 written; from memory: 10 and 5.
READ, CLOSED_BOOK, OPEN_BOOK = EventCost(0, 10, 2, 1.0), EventCost(0, 0, 3, 1.5), EventCost(0, 100, 5, 4.0)
EVENTS = [
    TrafficEvent(
        need,
        decision_cost=READ,
        cost_if_skipped=CLOSED_BOOK,
        cost_if_retrieved=OPEN_BOOK,
        loses_answer=loses,
        cost_without_gate=EventCost(0, 10, 5, 2.5),
        right=(not loses, True, True),
    )
    for need, loses in ((0.1, False), (0.2, True), (0.8, True), (0.9, True))
]
PRICES = Prices(search=0.01, input_token=0.001, output_token=0.002)


def test_always_pays_a_search_and_the_passages_of_every_question():
    assert compare_traffic_costs(Traffic(EVENTS), 0.5, PRICES).always.money(PRICES) == pytest.approx(0.01 + 0.1 + 0.01)


def test_never_pays_the_closed_book_answer_and_no_gate():
    never = compare_traffic_costs(Traffic(EVENTS), 0.5, PRICES).never
    assert (never.searches, never.money(PRICES)) == (0.0, pytest.approx(0.01 + 0.01))


def test_gated_retrieval_pays_for_reading_and_one_answer():
    gated = compare_traffic_costs(Traffic(EVENTS), 0.5, PRICES).gated
    assert (gated.searches, gated.prompt, gated.completion) == (0.5, 60.0, 6.0)
    assert gated.money(PRICES) == pytest.approx(0.005 + 0.06 + 0.012)


def test_the_gpu_price_is_per_hour():
    costing = compare_traffic_costs(Traffic(EVENTS), 0.5, Prices(gpu_hour=3600.0))
    assert (costing.always.money(costing.prices), costing.gated.money(costing.prices)) == (4.0, 1.0 + (1.5 + 4.0) / 2)


def test_gated_and_always_cost_the_same_at_the_break_even_price():
    costly = [
        TrafficEvent(
            event.need,
            decision_cost=EventCost(0, 400, 2, 1.0),
            cost_if_skipped=CLOSED_BOOK,
            cost_if_retrieved=OPEN_BOOK,
        )
        for event in EVENTS
    ]
    price = compare_traffic_costs(Traffic(costly), 0.5, PRICES).break_even
    at_it = PRICES.replace(search=price)
    comparison = compare_traffic_costs(Traffic(costly), 0.5, at_it)
    assert price > 0
    assert comparison.always.money(at_it) == pytest.approx(comparison.gated.money(at_it))


def test_right_answers_that_a_skip_loses_are_counted_on_graded_rows():
    costing = compare_traffic_costs(Traffic(EVENTS), 0.5, PRICES)
    assert [bill.lost.hits for bill in (costing.always, costing.never, costing.gated)] == [0, 3, 1]


def test_the_change_of_right_answers_is_gained_minus_lost():
    gaining = [replace(event, right=(True, False, False)) for event in EVENTS[:1]]
    costing = compare_traffic_costs(Traffic(gaining + EVENTS[1:]), 0.5, PRICES)
    assert [cost.change for cost in (costing.always, costing.never, costing.gated)] == [0.0, (1 - 3) / 4, 0.0]
    assert (costing.gated.lost.hits, costing.gated.gained.hits) == (1, 1)


def test_a_cost_is_unknown_if_a_priced_amount_is_not_recorded():
    unknown = [TrafficEvent(0.2, retrieved=False), TrafficEvent(0.8, retrieved=True)]
    costing = compare_traffic_costs(Traffic(unknown), 0.5, PRICES)
    assert costing.gated.money(PRICES) is None
    assert costing.break_even is None
    assert costing.gated.money(Prices(search=0.01)) == pytest.approx(0.005)


def test_without_a_price_of_the_llm_the_break_even_price_is_unknown():
    comparison = compare_traffic_costs(Traffic(EVENTS), 0.5, Prices(search=0.01))
    assert (comparison.always.calls, comparison.gated.calls, comparison.break_even) == (1.0, 1.5, None)
    assert comparison.break_even_call == pytest.approx(0.01)  # half a search saved for half a call


@pytest.mark.parametrize(
    ("always_calls", "gated_calls", "skipped", "price"),
    [(1.0, 2.0, 0.5, 2.0), (2.0, 1.0, 0.5, 0.0), (1.0, 2.0, 0.0, None)],
)
def test_the_break_even_price_can_be_positive_zero_or_undefined(always_calls, gated_calls, skipped, price):
    always = PolicyCost(1.0, None, None, calls=always_calls)
    gated = PolicyCost(1.0 - skipped, None, None, calls=gated_calls)
    assert CostComparison(always, always, gated, Prices(llm_call=1.0)).break_even == price


def test_a_price_per_call_counts_the_drafts_of_retrieved_questions():
    prices = Prices(search=0.0, llm_call=0.01)
    comparison = compare_traffic_costs(Traffic(EVENTS), 0.5, prices)
    assert comparison.gated.money(prices) == pytest.approx(0.015)
    assert comparison.break_even == pytest.approx(0.01)


def test_prices_are_read_from_toml(tmp_path):
    (tmp_path / "prices.toml").write_text("search = 0.01\ngpu_hour = 2\n")
    assert read_prices(tmp_path / "prices.toml") == Prices(search=0.01, gpu_hour=2.0)


@pytest.mark.parametrize(
    ("text", "words"), [("serch = 1", "serch"), ("search = -1", "at least 0"), ("search = 'x'", "it must be a number")]
)
def test_invalid_price_files_are_rejected(tmp_path, text, words):
    (tmp_path / "prices.toml").write_text(text)
    with pytest.raises((BadInput, BadSetting), match=words):
        read_prices(tmp_path / "prices.toml")


def decisions(path, records):
    file = sqlite3.connect(path)
    file.execute("CREATE TABLE decisions (id TEXT, at REAL, question TEXT, record TEXT)")
    file.executemany("INSERT INTO decisions VALUES (?, ?, NULL, ?)", [(str(i), i, json.dumps(r)) for i, r in records])
    file.commit()
    file.close()


def test_decisions_of_the_server_log_are_traffic(tmp_path):
    one = {"need": 0.8, "retrieve": True, "threshold": 0.5, "gate": "skr", "gated": True}
    let_through = {"gated": False, "why_not": "no question"}
    decisions(tmp_path / "d.sqlite", enumerate([one, {**one, "need": 0.1, "retrieve": False}, let_through]))
    log = read_server_log(tmp_path / "d.sqlite")
    assert ([event.need for event in log.events], dict(log.thresholds)) == ([0.8, 0.1], {0.5: 2})
    assert math.isnan(log.events[0].cost_if_retrieved.prompt)


@pytest.mark.parametrize(("given", "loses_answer"), [("draft", [True, False]), ("passages", [None, None])])
def test_an_audit_of_a_retrieved_question_counts_if_the_arbiter_sent_the_draft(tmp_path, given, loses_answer):
    one = {"need": 0.8, "retrieve": True, "threshold": 0.5, "gate": "logprob", "choice": {"given": given}}
    decisions(tmp_path / "d.sqlite", enumerate([one, one]))
    with closing(sqlite3.connect(tmp_path / "d.sqlite")) as file, file:
        file.execute("CREATE TABLE audits (number INTEGER PRIMARY KEY, decision TEXT, kind TEXT, lost REAL)")
        file.executemany("INSERT INTO audits (decision, kind, lost) VALUES (?, 'loss', ?)", [("0", 1.0), ("1", 0.0)])
    events = read_server_log(tmp_path / "d.sqlite").events
    assert [event.loses_answer for event in events] == loses_answer


def test_decisions_whose_reply_was_an_error_are_left_out_and_counted(tmp_path):
    one = {
        "need": 0.8,
        "retrieve": True,
        "threshold": 0.5,
        "gate": "logprob",
        "gated": True,
    }  # without a status, as in 0.1
    decisions(tmp_path / "d.sqlite", enumerate([one, *({**one, "status": status} for status in (200, 400, 499, 503))]))
    log = read_server_log(tmp_path / "d.sqlite")
    assert (len(log.events), log.left_out) == (2, {"answered with an error": 3})


def test_gates_of_the_same_name_in_two_arms_are_not_mixed(tmp_path):
    one = {"need": 0.8, "retrieve": True, "threshold": 0.5, "gate": "logprob", "gated": True}
    decisions(tmp_path / "d.sqlite", enumerate([{**one, "arm": "a"}, {**one, "arm": "b", "need": 0.1}, one]))
    log = read_server_log(tmp_path / "d.sqlite")
    assert [event.need for event in log.events] == [0.8, 0.8]  # without an A/B test, the gate is arm a
    assert log.left_out == {"of another gate, threshold or arm": 1}


@pytest.mark.parametrize(
    "damaged",
    ["null", "[1]", '{"need": 0.', '{"retrieve": true}', '{"need": NaN, "retrieve": true, "threshold": 1, "gate": "g"}',
     '{"need": "x", "retrieve": true, "threshold": 0.5, "gate": "skr"}',
     '{"retrieve": true, "threshold": 1, "gate": "g"}',
     '{"need": 1, "retrieve": true, "threshold": 0.5, "gate": "skr", "milliseconds": {"total": "long"}}'],
)  # fmt: skip
def test_a_damaged_decision_is_left_out_and_counted(tmp_path, damaged):
    one = {"need": 0.8, "retrieve": True, "threshold": 0.5, "gate": "skr", "gated": True}
    decisions(tmp_path / "d.sqlite", [(0, one)])
    with sqlite3.connect(tmp_path / "d.sqlite") as file:
        file.execute("INSERT INTO decisions VALUES ('x', 1, NULL, ?)", (damaged,))
    log = read_server_log(tmp_path / "d.sqlite")
    assert (len(log.events), log.left_out) == (1, {"that cannot be read": 1})


def test_another_database_is_rejected(tmp_path):
    file = sqlite3.connect(tmp_path / "d.sqlite")
    file.execute("CREATE TABLE other (x)")
    file.commit()
    file.close()
    with pytest.raises(BadInput, match="the table `decisions` is missing"):
        read_server_log(tmp_path / "d.sqlite")


def test_the_money_of_a_question_is_its_searches_and_its_tokens_or_calls():
    cost = PolicyCost(searches=0.5, prompt=100.0, completion=20.0, calls=1.5)
    assert cost.money(CostAssumptions(price_search=0.01, price_token=0.001).prices) == pytest.approx(0.005 + 0.12)
    assert cost.money(CostAssumptions(price_search=0.01, price_llm_call=0.1).prices) == pytest.approx(0.005 + 0.15)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"search_seconds": 2}, "$0.005 a search (assumed) and $0.30 a million tokens (assumed)"),
        ({"price_search": 0.005}, "$0.005 a search (your price) and $0.30 a million tokens (assumed)"),
        ({"price_llm_call": 0.001}, "$0.005 a search (assumed) and $0.001 an LLM call (your price)"),
    ],
)
def test_every_price_says_whether_it_is_assumed(given, text):
    assert describe_prices(CostAssumptions(**given)) == text


def test_an_arbiter_counts_only_after_gated_retrieval():
    """The arbiter repairs the answer to a retrieved question; always retrieving has no arbiter."""
    events = [replace(event, right=(False, False, True)) for event in EVENTS]
    costing = compare_traffic_costs(Traffic(events), 0.5, PRICES)
    retrieved = sum(event.need > 0.5 for event in EVENTS)
    assert [cost.gained.hits for cost in (costing.always, costing.never, costing.gated)] == [0, 0, retrieved]
