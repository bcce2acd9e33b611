"""`knowgate cost`: what always, never and gated retrieval cost, and from which price of a search on a gate pays."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from knowgate.cli.console import STDERR_CONSOLE, print_json, print_tables
from knowgate.cli.options import parse_log_location, parse_path
from knowgate.cli.replay import name_thresholds, print_log_summary, read_traffic
from knowgate.core.display import MISSING_VALUE, TextTable
from knowgate.core.validation import check_number
from knowgate.errors import BadSetting
from knowgate.evaluation.cost import (
    COST_QUESTIONS,
    DEFAULT_SEARCH_PRICE,
    DEFAULT_TOKEN_PRICE,
    CostComparison,
    PriceTable,
    TrafficCost,
    compare_traffic_costs,
    read_price_table,
)
from knowgate.evaluation.replay import Prices, Traffic
from knowgate.evaluation.traffic_log import LoggedTraffic

ASSUMED_PRICES = PriceTable(DEFAULT_SEARCH_PRICE, DEFAULT_TOKEN_PRICE, DEFAULT_TOKEN_PRICE)


def cost_command(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG",
            help="Lines of `knowgate ask --json`, the server's log (--decisions), or a label run folder.",
        ),
    ],
    gate: Annotated[
        str | None, typer.Option(help="For a label run: the gate to cost. For a log: the fitted gate that it ran with.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Retrieve above this need. [default: the gate's own, or as the log ran]")
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(parser=parse_path, metavar="FILE", help="TOML: search, input_token, output_token, gpu_hour."),
    ] = None,
    price_search: Annotated[float | None, typer.Option(help="Price of one search; goes before the file's.")] = None,
    price_input_token: Annotated[float | None, typer.Option(help="Price of one prompt token, e.g. 3e-7.")] = None,
    price_output_token: Annotated[float | None, typer.Option(help="Price of one generated token, e.g. 1.2e-6.")] = None,
    price_gpu_hour: Annotated[
        float | None,
        typer.Option(help="Price of an hour of the LLM's GPU, where tokens have none."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
) -> None:
    """Show what 1,000 questions cost with always, never and gated retrieval, and the break-even price of a search.

    Example: knowgate cost traffic.jsonl --prices prices.toml
    """
    given = _prices(prices, price_search, price_input_token, price_output_token, price_gpu_hour)
    logged = read_traffic(parse_log_location(log), gate)
    traffic = Traffic(logged.events)
    costing = compare_traffic_costs(traffic, _threshold(logged, gate, threshold), (given or ASSUMED_PRICES).prices)
    if as_json:
        print_json(_record(logged, costing))
    else:
        print_tables([build_bill_table(costing)])
        print_cost_summary(costing)
    if given is None:
        STDERR_CONSOLE.print(
            "Prices are assumed (US dollars): give yours with --prices or --price-search and the others."
        )
    print_log_summary(logged, traffic)


def _prices(file: Path | None, *given: float | None) -> PriceTable | None:
    """The file's, with what was given beside it; None where nothing was."""
    if file is None and all(price is None for price in given):
        return None
    table = asdict(read_price_table(file) if file else PriceTable())
    named = {name: price for name, price in zip(table, given, strict=True) if price is not None}
    for name, price in named.items():
        check_number(price, f"--price-{name.replace('_', '-')}", maximum=1e12)
    return PriceTable(**{**table, **named})


def _threshold(log: LoggedTraffic, gate: str | None, given: float | None) -> float:
    if given is not None:
        return check_number(given, "--threshold", maximum=1)
    named = name_thresholds(log, gate)
    if not named:
        several = ", ".join(f"{value:g}" for value in sorted(log.thresholds))
        raise BadSetting(f"the log ran with several thresholds or none ({several or 'none'}): give --threshold T.")
    return next(iter(named))


def build_bill_table(costing: CostComparison) -> TextTable:
    """A row for each way."""
    gated = f"gated at {costing.threshold:g}"
    bills = {"always": costing.always, "never": costing.never, gated: costing.gated}
    columns = (
        "per 1,000 questions",
        "money",
        "searches",
        "tokens read",
        "tokens written",
        "GPU seconds",
        "lost",
    )
    rows = tuple((name, *_cells(bill, costing.prices)) for name, bill in bills.items())
    return TextTable("", columns, rows)


def _cells(bill: TrafficCost, prices: Prices) -> tuple[str, ...]:
    lost = (
        MISSING_VALUE if bill.lost is None else f"{COST_QUESTIONS * bill.lost.value:,.0f}" if bill.lost.value else "0"
    )
    amounts = (bill.searches, bill.prompt, bill.completion, bill.gpu)
    return (_shown(bill.money(prices), "{:,.4g}"), *(_shown(amount, "{:,.0f}") for amount in amounts), lost)


def _shown(amount: float | None, form: str) -> str:
    return MISSING_VALUE if amount is None else form.format(COST_QUESTIONS * amount)


def print_cost_summary(costing: CostComparison) -> None:
    """What it comes to, in sentences."""
    always, gated = (bill.money(costing.prices) for bill in (costing.always, costing.gated))
    if always is not None and gated is not None:
        saved = COST_QUESTIONS * (always - gated)
        STDERR_CONSOLE.print(
            f"The gate {'saves' if saved >= 0 else 'costs'} {abs(saved):,.4g} on {COST_QUESTIONS:,} questions."
        )
    STDERR_CONSOLE.print(describe_break_even(costing))


def describe_break_even(costing: CostComparison) -> str:
    price = costing.break_even
    if price is None:
        return _why_unknown(costing)
    if price == 0:
        return "The gate pays whatever a search costs: skipping saves more of the LLM's work than deciding takes."
    return f"The gate pays where a search costs more than {price:.3g}."


def _why_unknown(costing: CostComparison) -> str:
    bills = (costing.always, costing.gated)
    missing = dict.fromkeys(name for bill in bills for name in bill.missing(costing.prices))
    if not missing:
        return "The gate skips nothing at this threshold, so it pays at no price of a search."
    left_out = " ".join(f"--price-{name} 0" for name in missing)
    return f"What has a price is not on record here, so the sums are not known. Leave it out of them: {left_out}"


def _record(log: LoggedTraffic, costing: CostComparison) -> dict[str, Any]:
    ways = {"always": costing.always, "never": costing.never, "gated": costing.gated}
    money = {name: bill.money(costing.prices) for name, bill in ways.items()}
    return {
        "log": str(log.path),
        "questions": costing.n,
        "gate": ", ".join(log.gates),
        "threshold": costing.threshold,
        "prices": asdict(costing.prices),
        "per": COST_QUESTIONS,
        "money": {name: None if amount is None else COST_QUESTIONS * amount for name, amount in money.items()},
        "break_even_search": costing.break_even,
        "per_question": {name: asdict(bill) for name, bill in ways.items()},
    }
