"""`knowgate cost`: what always, never and gated retrieval cost, and the search price above which a gate is cheaper."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from knowgate.cli.console import inform, print_json, print_tables, print_text
from knowgate.cli.options import parse_log_location, path_option
from knowgate.cli.replay import ArbiterOption, LogArgument, name_thresholds, print_log_summary, read_traffic
from knowgate.core.display import UNKNOWN_AMOUNT, TextTable
from knowgate.core.options import get_set_fields
from knowgate.core.validation import check_number
from knowgate.errors import BadSetting
from knowgate.evaluation.cost import (
    COST_QUESTIONS,
    DEFAULT_SEARCH_PRICE,
    DEFAULT_TOKEN_PRICE,
    CostComparison,
    compare_traffic_costs,
    read_prices,
)
from knowgate.evaluation.replay import PolicyCost, Prices, Traffic
from knowgate.evaluation.report.evaluation_verdict import NOT_COUNTED
from knowgate.evaluation.traffic_log import LoggedTraffic
from knowgate.gates.fitted_gate import has_judge

ASSUMED_PRICES = Prices(search=DEFAULT_SEARCH_PRICE, input_token=DEFAULT_TOKEN_PRICE, output_token=DEFAULT_TOKEN_PRICE)
ASSUMED_PRICES_MESSAGE = "These are default prices in US dollars. Set your own: --price-search, --price-llm-call."


def cost_command(
    log: LogArgument,
    options: Prices,
    gate: Annotated[
        str | None,
        typer.Option(help="Gate whose cost to show. A label run needs one. For a log: the fitted gate that decided."),
    ] = None,
    arbiter: ArbiterOption = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Need for retrieval (0 to 1) above which the gate retrieves. [default: the gate's own threshold, or "
            "the one that the log ran with]"
        ),
    ] = None,
    prices: Annotated[
        Path | None,
        path_option(
            "FILE",
            "TOML file with prices: search, llm_call, input_token, output_token, gpu_hour. Flags take precedence.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Compare what 1,000 questions cost if you always retrieve, never retrieve, or use a gate.

    Prints what the gate saves, the break-even price (the price of a search above which the gate is cheaper than always
    retrieving), and a table. Money is in the currency of your prices.

    Example: knowgate cost traffic.jsonl --prices prices.toml
    """
    given = get_set_fields(options)
    are_assumed = prices is None and not given
    file_prices = read_prices(prices) if prices else Prices()
    used_prices = ASSUMED_PRICES if are_assumed else file_prices.replace(**given)
    logged = read_traffic(parse_log_location(log), gate, arbiter)
    traffic = Traffic(logged.events)
    used_threshold = _choose_threshold(logged, gate, threshold)
    comparison = compare_traffic_costs(traffic, used_threshold, used_prices)
    if are_assumed and comparison.always.missing_amounts(used_prices):  # a log without tokens: show searches alone
        comparison = replace(comparison, prices=Prices(search=DEFAULT_SEARCH_PRICE))
    if as_json:
        print_json(_make_record(logged, comparison, used_threshold))
    else:
        currency = "US dollars" if are_assumed else "the currency of your prices"
        used = filter(None, [gate, *logged.gates, logged.arbiter])
        not_counted = f" {NOT_COUNTED}" if any(map(has_judge, used)) else ""
        print_text(f"{describe_saving(comparison, currency)} {describe_break_even(comparison)}{not_counted}")
        print_tables([build_cost_table(comparison, used_threshold, currency)])
    if are_assumed:
        inform(ASSUMED_PRICES_MESSAGE)
    print_log_summary(logged, traffic)


def _choose_threshold(log: LoggedTraffic, gate: str | None, threshold: float | None) -> float:
    """Return the threshold that the user gave, else that of the gate, else the only one that the log ran with."""
    if threshold is not None:
        return check_number(threshold, "--threshold", maximum=1)
    named = name_thresholds(log, gate)
    if not named:
        used = ", ".join(f"{value:g}" for value in sorted(log.thresholds)) or "none"
        raise BadSetting(f"the log has decisions at these thresholds: {used}. Set --threshold to the one to use.")
    return next(iter(named))


def build_cost_table(comparison: CostComparison, threshold: float, currency: str) -> TextTable:
    """Build the cost table, with one row for always, never and gated retrieval.

    A column is left out if its amount is unknown in all rows.
    """
    money = "money" if comparison.prices.include_llm else "money, searches only"
    columns = (
        "", money, "searches", "LLM calls", "right, against always", "lost", "tokens read", "tokens written", "GPU seconds",
    )  # fmt: skip
    rows = [(name, *_make_cells(cost, comparison.prices)) for name, cost in comparison.policies.items()]
    known = [cells for cells in zip(columns, *rows, strict=True) if set(cells[1:]) != {UNKNOWN_AMOUNT}]
    columns, *rows = zip(*known, strict=True)
    title = f"Per {COST_QUESTIONS:,} questions, gated at the threshold {threshold:g}, money in {currency}"
    return TextTable(title, columns, tuple(rows))


def _make_cells(cost: PolicyCost, prices: Prices) -> tuple[str, ...]:
    """Format what `COST_QUESTIONS` questions cost, as cells in the order of the columns of the cost table."""
    lost = cost.lost.value if cost.lost else None
    amounts = (cost.money(prices), cost.searches, cost.calls, cost.change, lost, cost.prompt, cost.completion, cost.gpu)
    templates = ("{:,.4g}", "{:,.0f}", "{:,.0f}", "{:+,.1f}", "{:,.1f}", "{:,.0f}", "{:,.0f}", "{:,.0f}")
    return tuple(map(_format, amounts, templates))


def _format(amount: float | None, template: str) -> str:
    """Format an amount per question as an amount per `COST_QUESTIONS` questions."""
    return UNKNOWN_AMOUNT if amount is None else template.format(COST_QUESTIONS * amount)


def describe_saving(comparison: CostComparison, currency: str) -> str:
    """Say what the gate saves, if the costs are known, and how many right answers that costs, if they are graded."""
    always, gated = (cost.money(comparison.prices) for cost in (comparison.always, comparison.gated))
    verdict = f"The gate skips {comparison.searches:.0%} of the searches."
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
    price = comparison.break_even
    if price is None and not comparison.prices.include_llm:
        return _describe_unpriced_calls(comparison)
    if price == 0:
        return "The gate is cheaper at any price of a search: at these prices, its LLM calls cost no more than always retrieving."
    if price is not None:
        return f"The gate is cheaper if a search costs more than {price:.3g}."
    costs = (comparison.always, comparison.gated)
    missing = dict.fromkeys(name for cost in costs for name in cost.missing_amounts(comparison.prices))
    if not missing:
        return "The gate skips no search at this threshold, so it is never cheaper."
    flags = " ".join(f"--price-{name.replace('_', '-')} 0" for name in missing)
    return (
        "The total is unknown, because the log does not record some amounts that have a price. Prices to set to 0, to leave "
        f"them out: {flags}."
    )


def _describe_unpriced_calls(comparison: CostComparison) -> str:
    """Say that the total is unknown because LLM calls have no price.

    If the number of LLM calls is known, also say below which price of a call (`break_even_call`) the gate is cheaper than
    always retrieving.
    """
    advice = "Set a price with --price-llm-call or, if the log records tokens, --price-token."
    if comparison.extra_calls is None or comparison.gated.calls is None:
        return f"The money leaves out LLM calls, which have no price. {advice}"
    calls = f"{comparison.gated.calls:.2f} LLM calls per question where always retrieving makes 1"
    bound = comparison.break_even_call
    limit = f" It is cheaper if a call costs less than {bound:.3g}." if bound else ""
    return f"The money leaves out LLM calls, which have no price: the gate makes {calls}.{limit} {advice}"


def _make_record(log: LoggedTraffic, comparison: CostComparison, threshold: float) -> dict[str, Any]:
    money = {name: cost.money(comparison.prices) for name, cost in comparison.policies.items()}
    return {
        "log": str(log.path),
        "questions": len(log.events),
        "gate": ", ".join(log.gates),
        "arbiter": log.arbiter,
        "threshold": threshold,
        "prices": comparison.prices.to_dict(),
        "per": COST_QUESTIONS,
        "money": {name: None if amount is None else COST_QUESTIONS * amount for name, amount in money.items()},
        "break_even_search": comparison.break_even,
        "per_question": {name: asdict(cost) for name, cost in comparison.policies.items()},
    }
