"""`knowgate cost`: what always, never and gated retrieval cost, and the search price above which a gate is cheaper."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from knowgate.cli.console import STDERR_CONSOLE, print_json, print_tables
from knowgate.cli.options import parse_log_location, parse_path
from knowgate.cli.replay import LogArgument, name_thresholds, print_log_summary, read_traffic
from knowgate.core.display import MISSING_VALUE, TextTable
from knowgate.core.validation import check_number
from knowgate.errors import BadSetting
from knowgate.evaluation.cost import (
    COST_QUESTIONS,
    DEFAULT_SEARCH_PRICE,
    DEFAULT_TOKEN_PRICE,
    CostComparison,
    TrafficCost,
    compare_traffic_costs,
    read_prices,
)
from knowgate.evaluation.replay import Prices, Traffic
from knowgate.evaluation.traffic_log import LoggedTraffic

ASSUMED_PRICES = Prices(search=DEFAULT_SEARCH_PRICE, input_token=DEFAULT_TOKEN_PRICE, output_token=DEFAULT_TOKEN_PRICE)


def cost_command(
    log: LogArgument,
    options: Prices,
    gate: Annotated[
        str | None, typer.Option(help="For a label run: the gate to cost. For a log: the fitted gate that it ran with.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Retrieve above this need. [default: the gate's own, or as the log ran]")
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="FILE",
            help="TOML: search, input_token, output_token, gpu_hour. Prices given as flags replace the file's.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
) -> None:
    """Show what 1,000 questions cost with always, never and gated retrieval, and the break-even price of a search.

    Example: knowgate cost traffic.jsonl --prices prices.toml
    """
    given = {name: getattr(options, name) for name in options.model_fields_set}
    are_assumed = prices is None and not given
    used_prices = ASSUMED_PRICES if are_assumed else (read_prices(prices) if prices else Prices()).replace(**given)
    logged = read_traffic(parse_log_location(log), gate)
    traffic = Traffic(logged.events)
    comparison = compare_traffic_costs(traffic, _choose_threshold(logged, gate, threshold), used_prices)
    if as_json:
        print_json(_make_record(logged, comparison))
    else:
        print_tables([build_cost_table(comparison)])
        _print_summary(comparison)
    if are_assumed:
        STDERR_CONSOLE.print(
            "Prices are assumed (US dollars). Give yours with --prices, or with --price-search and the others."
        )
    print_log_summary(logged, traffic)


def _choose_threshold(log: LoggedTraffic, gate: str | None, threshold: float | None) -> float:
    if threshold is not None:
        return check_number(threshold, "--threshold", maximum=1)
    named = name_thresholds(log, gate)
    if not named:
        used = ", ".join(f"{value:g}" for value in sorted(log.thresholds)) or "none"
        raise BadSetting(f"the log ran with several thresholds or none ({used}). Name one with --threshold.")
    return next(iter(named))


def build_cost_table(comparison: CostComparison) -> TextTable:
    """Build the table with a row for each policy."""
    columns = ("per 1,000 questions", "money", "searches", "tokens read", "tokens written", "GPU seconds", "lost")
    rows = []
    for name, cost in comparison.policies.items():
        label = f"gated at {comparison.threshold:g}" if name == "gated" else name
        rows.append((label, *_make_cells(cost, comparison.prices)))
    return TextTable("", columns, tuple(rows))


def _make_cells(cost: TrafficCost, prices: Prices) -> tuple[str, ...]:
    amounts = (cost.searches, cost.prompt, cost.completion, cost.gpu, cost.lost.value if cost.lost else None)
    return (_format(cost.money(prices), "{:,.4g}"), *(_format(amount, "{:,.0f}") for amount in amounts))


def _format(amount: float | None, template: str) -> str:
    return MISSING_VALUE if amount is None else template.format(COST_QUESTIONS * amount)


def _print_summary(comparison: CostComparison) -> None:
    always, gated = (cost.money(comparison.prices) for cost in (comparison.always, comparison.gated))
    if always is not None and gated is not None:
        saved = COST_QUESTIONS * (always - gated)
        verb = "saves" if saved >= 0 else "costs"
        STDERR_CONSOLE.print(f"The gate {verb} {abs(saved):,.4g} on {COST_QUESTIONS:,} questions.")
    STDERR_CONSOLE.print(describe_break_even(comparison))


def describe_break_even(comparison: CostComparison) -> str:
    """Say from which price of a search the gate is cheaper than always retrieving."""
    price = comparison.break_even
    if price == 0:
        return "The gate pays at any price of a search: skipping saves more of the LLM's work than deciding takes."
    if price is not None:
        return f"The gate pays if a search costs more than {price:.3g}."
    costs = (comparison.always, comparison.gated)
    missing = dict.fromkeys(name for cost in costs for name in cost.missing_amounts(comparison.prices))
    if not missing:
        return "The gate skips nothing at this threshold, so it pays at no price of a search."
    flags = " ".join(f"--price-{name.replace('_', '-')} 0" for name in missing)
    return f"Amounts that have a price are not on record, so the total is unknown. Leave them out: {flags}"


def _make_record(log: LoggedTraffic, comparison: CostComparison) -> dict[str, Any]:
    money = {name: cost.money(comparison.prices) for name, cost in comparison.policies.items()}
    return {
        "log": str(log.path),
        "questions": comparison.n,
        "gate": ", ".join(log.gates),
        "threshold": comparison.threshold,
        "prices": comparison.prices.to_dict(),
        "per": COST_QUESTIONS,
        "money": {name: None if amount is None else COST_QUESTIONS * amount for name, amount in money.items()},
        "break_even_search": comparison.break_even,
        "per_question": {name: asdict(cost) for name, cost in comparison.policies.items()},
    }
