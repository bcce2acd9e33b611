"""`knowgate cost`: what always, never and gated retrieval cost, and the search price above which a gate is cheaper."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from knowgate.cli.console import inform, print_json, print_tables, print_text
from knowgate.cli.replay import LogArgument, TrafficOptions, name_thresholds, print_log_summary, read_traffic
from knowgate.core.display import UNKNOWN_AMOUNT, TextTable
from knowgate.core.options import Share, get_set_fields, option
from knowgate.errors import BadSetting
from knowgate.evaluation.cost import (
    COST_QUESTIONS,
    DEFAULT_SEARCH_PRICE,
    DEFAULT_TOKEN_PRICE,
    CostComparison,
    compare_traffic_costs,
    read_prices,
)
from knowgate.evaluation.replay import Prices, Traffic
from knowgate.evaluation.report.evaluation_verdict import NOT_COUNTED
from knowgate.evaluation.traffic_log import LoggedTraffic
from knowgate.gates.fitted_gate import has_judge

ASSUMED_PRICES = Prices(search=DEFAULT_SEARCH_PRICE, input_token=DEFAULT_TOKEN_PRICE, output_token=DEFAULT_TOKEN_PRICE)
ASSUMED_PRICES_MESSAGE = "These are default prices in US dollars. Set your own: --price-search, --price-llm-call."


class CostOptions(TrafficOptions):
    """Options of `knowgate cost`, besides prices."""

    threshold: Share | None = option(None, "Need above which to retrieve. Default: the gate's own, or the log's.")
    prices: Path | None = option(
        None, "TOML file with prices: search, llm_call, input_token, output_token, gpu_hour.", metavar="FILE"
    )


def cost_command(log: LogArgument, price_flags: Prices, options: CostOptions) -> None:
    """Compare what 1,000 questions cost if you always retrieve, never retrieve, or use a gate.

    Prints what the gate saves, the break-even price (the price of a search above which the gate is cheaper than always
    retrieving), and a table. Money is in the currency of your prices.

    Example: knowgate cost traffic.jsonl --prices prices.toml
    """
    given = get_set_fields(price_flags)
    are_assumed = options.prices is None and not given
    file_prices = read_prices(options.prices) if options.prices else Prices()
    prices = ASSUMED_PRICES if are_assumed else file_prices.replace(**given)
    logged = read_traffic(log, options)
    traffic = Traffic(logged.events)
    comparison = compare_traffic_costs(traffic, _choose_threshold(logged, options), prices)
    if are_assumed and comparison.always.missing_amounts(prices):  # a log without tokens: show searches alone
        comparison = replace(comparison, prices=Prices(search=DEFAULT_SEARCH_PRICE))
    if options.as_json:
        print_json(_make_record(logged, comparison))
    else:
        currency = "US dollars" if are_assumed else "the currency of your prices"
        used = filter(None, [options.gate, *logged.gates, logged.arbiter])
        not_counted = f" {NOT_COUNTED}" if any(map(has_judge, used)) else ""
        print_text(f"{describe_saving(comparison, currency)} {describe_break_even(comparison)}{not_counted}")
        print_tables([build_cost_table(comparison, currency)])
    if are_assumed:
        inform(ASSUMED_PRICES_MESSAGE)
    print_log_summary(logged, traffic)


def _choose_threshold(log: LoggedTraffic, options: CostOptions) -> float:
    """Return the threshold that the user gave, else that of the gate, else the only one that the log ran with."""
    if options.threshold is not None:
        return options.threshold
    named = name_thresholds(log, options.gate)
    if not named:
        used = ", ".join(f"{value:g}" for value in sorted(log.thresholds)) or "none"
        raise BadSetting(f"the log has decisions at these thresholds: {used}. Set --threshold to the one to use.")
    return next(iter(named))


def build_cost_table(comparison: CostComparison, currency: str) -> TextTable:
    """Build the cost table, with one row for always, never and gated retrieval.

    A column is left out if its amount is unknown in all rows.
    """
    money = "money" if comparison.prices.include_llm else "money, searches only"
    costs = comparison.policies.values()
    columns = {
        money: [_format(cost.money(comparison.prices), "{:,.4g}") for cost in costs],
        "searches": [_format(cost.searches) for cost in costs],
        "LLM calls": [_format(cost.calls) for cost in costs],
        "right, against always": [_format(cost.change, "{:+,.1f}") for cost in costs],
        "lost": [_format(cost.lost.value if cost.lost else None, "{:,.1f}") for cost in costs],
        "tokens read": [_format(cost.prompt) for cost in costs],
        "tokens written": [_format(cost.completion) for cost in costs],
        "GPU seconds": [_format(cost.gpu) for cost in costs],
    }
    known = {title: cells for title, cells in columns.items() if set(cells) != {UNKNOWN_AMOUNT}}
    title = f"Per {COST_QUESTIONS:,} questions, gated at the threshold {comparison.threshold:g}, money in {currency}"
    return TextTable(title, ("", *known), tuple(zip(comparison.policies, *known.values(), strict=True)))


def _format(amount: float | None, template: str = "{:,.0f}") -> str:
    """Format an amount per question as an amount per `COST_QUESTIONS` questions."""
    return UNKNOWN_AMOUNT if amount is None else template.format(COST_QUESTIONS * amount)


def describe_saving(comparison: CostComparison, currency: str) -> str:
    """Say what the gate saves, if the costs are known, and how many right answers that costs, if they are graded."""
    always, gated = comparison.always.money(comparison.prices), comparison.gated.money(comparison.prices)
    skipped = comparison.always.searches - comparison.gated.searches
    verdict = f"The gate skips {skipped:.0%} of the searches."
    if always is not None and gated is not None:
        saved = COST_QUESTIONS * (always - gated)
        amount = f"{abs(saved):,.4g}{'' if comparison.prices.include_llm else ' in searches'}"
        verb = "saves" if saved >= 0 else "costs"
        verdict = f"{verdict} That {verb} {amount} per {COST_QUESTIONS:,} questions, in {currency}."
    lost, gained = comparison.gated.lost, comparison.gated.gained
    if lost is None or gained is None:
        return verdict
    counts = f"{lost.hits:,} lost and {gained.hits:,} gained among {lost.n:,} graded questions"
    change = f"{_format(comparison.gated.change, '{:+,.1f}')} per {COST_QUESTIONS:,} questions"
    return f"{verdict} Right answers, against always retrieving: {change} ({counts})."


def describe_break_even(comparison: CostComparison) -> str:
    """Say above which price of a search the gate is cheaper than always retrieving, or why that is unknown.

    The price (`break_even`) is None if LLM calls have no price, if the log lacks an amount that has a price, or if the
    gate skips no search.
    """
    if comparison.break_even is not None:
        return f"The gate is cheaper if a search costs more than {comparison.break_even:.3g}."
    if not comparison.prices.include_llm:
        return _describe_unpriced_calls(comparison)
    missing = [
        *comparison.always.missing_amounts(comparison.prices),
        *comparison.gated.missing_amounts(comparison.prices),
    ]
    if not missing:
        return "The gate skips no search at this threshold, so it is never cheaper."
    flags = " ".join(f"--price-{name.replace('_', '-')} 0" for name in dict.fromkeys(missing))
    return (
        "The total is unknown, because the log does not record some amounts that have a price. Prices to set to 0, to leave "
        f"them out: {flags}."
    )


def _describe_unpriced_calls(comparison: CostComparison) -> str:
    """Say that the total is unknown because LLM calls have no price.

    If the number of LLM calls is known, also say below which price of a call (`break_even_call`) the gate is cheaper than
    always retrieving.
    """
    text = "The money leaves out LLM calls, which have no price."
    if comparison.gated.calls is not None:
        text += f" The gate makes {comparison.gated.calls:.2f} LLM calls per question where always retrieving makes 1."
    if comparison.break_even_call:
        text += f" It is cheaper if a call costs less than {comparison.break_even_call:.3g}."
    return f"{text} Set a price with --price-llm-call or, if the log records tokens, --price-token."


def _make_record(log: LoggedTraffic, comparison: CostComparison) -> dict[str, Any]:
    money = {name: cost.money(comparison.prices) for name, cost in comparison.policies.items()}
    return {
        "log": str(log.path),
        "questions": comparison.n,
        "gate": ", ".join(log.gates),
        "arbiter": log.arbiter,
        "threshold": comparison.threshold,
        "prices": comparison.prices.to_dict(),
        "per": COST_QUESTIONS,
        "money": {name: None if amount is None else COST_QUESTIONS * amount for name, amount in money.items()},
        "break_even_search": comparison.break_even,
        "per_question": {name: asdict(cost) for name, cost in comparison.policies.items()},
    }
