"""`knowgate replay` and `knowgate cost`: what thresholds would have saved and risked on logged traffic, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from knowgate.cli.console import inform, print_json, print_tables, print_text
from knowgate.cli.options import parse_log_location, parse_thresholds
from knowgate.core.display import UNKNOWN_AMOUNT, TextTable
from knowgate.core.options import Options, Share, get_set_fields, option
from knowgate.errors import BadSetting
from knowgate.evaluation import replay
from knowgate.evaluation.cost import (
    COST_QUESTIONS,
    DEFAULT_SEARCH_PRICE,
    DEFAULT_TOKEN_PRICE,
    CostComparison,
    compare_traffic_costs,
    read_prices,
)
from knowgate.evaluation.report.evaluation_verdict import NOT_COUNTED
from knowgate.evaluation.server_log import is_server_log, read_server_log
from knowgate.evaluation.traffic_log import LoggedTraffic, read_label_run_traffic, read_traffic_log
from knowgate.gates import load_gate
from knowgate.gates.fitted_gate import has_judge
from knowgate.stats.bootstrap import Estimate

LogArgument = Annotated[
    str,
    typer.Argument(metavar="LOG", help="Output of `ask --json`, log of `serve --decisions`, or label run to replay."),
]
# Column titles of the risk. "Changed" means that the answers with and without passages disagree; "lost" means that only
# the answer with passages is correct.
LOG_RISK, LABEL_RUN_RISK = "answers changed, of all", "right answers lost, of all"
ALWAYS_THRESHOLD = -1.0  # needs are at least 0, so every question is retrieved for


class TrafficOptions(Options):
    """Options that `knowgate replay` and `knowgate cost` share."""

    gate: str | None = option(None, "Gate to use. Required for a label run. For a log: the fitted gate that decided.")
    arbiter: str | None = option(
        None, "Arbiter that chooses between the answers of a label run.", metavar="DIR|rules|none"
    )
    as_json: bool = option(False, "Print one JSON object instead of the table.", flag="--json")


class ReplayOptions(TrafficOptions):
    """Options of `knowgate replay`."""

    arm: str | None = option(
        None, "Gate of an A/B test to replay from a server log. Default: the one that decided most.", metavar="a|b"
    )
    thresholds: str = option("0.1..0.9", "Thresholds to try: a range such as 0.1..0.9, in steps of 0.1, or a list.")


def replay_command(log: LogArgument, prices: replay.Prices, options: ReplayOptions) -> None:
    """Show what each threshold would have saved and risked on logged traffic.

    Everything is compared with always retrieving. The risk is a share of all questions that the gate decides on. On a
    label run, it is the share whose correct answer is lost because the search is skipped: a guarantee limits this loss. A
    log has no correct answers, so there it is the share whose answer changes because the search is skipped. It is
    unknown if fewer than 100 skipped questions have both answers.

    Example: knowgate replay traffic.jsonl --thresholds 0.2,0.4,0.6 --price-search 0.001
    """
    thresholds = parse_thresholds(options.thresholds)
    logged = read_traffic(log, options, options.arm)
    names = name_thresholds(logged, options.gate)
    if logged.constant_decision:  # the gate has no threshold that could be changed
        thresholds = []
    thresholds = [*thresholds, *names] or [ALWAYS_THRESHOLD]  # the keys of `names` are thresholds
    traffic = replay.Traffic(logged.events)
    results = replay.replay_traffic(traffic, thresholds, prices)
    if options.as_json:
        print_json(_make_replay_record(logged, results, prices, names))
    else:
        risk_title = LABEL_RUN_RISK if traffic.is_graded else LOG_RISK
        print_tables([_build_table(results, names, risk_title, with_money=prices.are_given)])
    print_log_summary(logged, traffic)
    _print_replay_caveats(logged, results, prices)


def _print_replay_caveats(logged: LoggedTraffic, results: Sequence[replay.ReplayResult], prices: replay.Prices) -> None:
    """Say what the replayed results leave out, and which risks are unknown."""
    call_savings = [result.savings["llm_calls"] for result in results]  # None if unknown
    makes_extra_calls = any(calls is not None and calls.saved < 0 for calls in call_savings)
    if prices.are_given and not prices.include_llm and makes_extra_calls:
        inform("The money saved is too high, because extra LLM calls are not priced (--price-llm-call).")
    if logged.constant_decision:
        inform("No other thresholds are shown. To compare some, serve with a gate that scores questions.")
    elif any(not result.has_evidence for result in results):
        inform("A risk is unknown if too few skipped questions have both answers (knowgate replay --help).")
        inform("Do not choose such a threshold. First collect more answers: knowgate serve --shadow --audit 1")


def read_traffic(location: str, options: TrafficOptions, arm: str | None = None) -> LoggedTraffic:
    """Read logged traffic: output of `ask --json`, a decision log of the server, or a label run.

    Args:
        location: File, folder or database of the log.
        options: The gate and the arbiter that decide on the questions of a label run.
        arm: Arm of an A/B test ('a' or 'b') whose decisions to read. Server logs only.
    """
    log = parse_log_location(location)
    if isinstance(log, Path) and log.is_dir():
        return _read_label_run(log, options)
    if options.arbiter is not None:
        raise BadSetting("--arbiter works only with a label run, not with a log. Leave --arbiter out.")
    if not isinstance(log, Path) or is_server_log(log):
        return read_server_log(log, arm)
    if arm is not None:
        raise BadSetting("--arm works only with a decision log of the server. Leave --arm out.")
    return read_traffic_log(log)


def _read_label_run(run: Path, options: TrafficOptions) -> LoggedTraffic:
    """Read a label run as traffic on which the given gate decides."""
    if options.gate is None:
        raise BadSetting(
            f"'{run}' contains recorded answers but no decisions. Name a gate that decides on its questions: --gate GATE. To "
            f"fit one: knowgate fit --labels {run} --out my-policy"
        )
    return read_label_run_traffic(run, options.gate, options.arbiter)


def name_thresholds(log: LoggedTraffic, gate: str | None) -> dict[float, str]:
    """Return notes on thresholds: {0.4: "the gate's own", 0.5: "as it ran"}. All logged decisions used the latter."""
    names: dict[float, str] = {}
    if gate is not None:
        own = _get_gate_threshold(log, gate) if log.run_threshold is None else log.run_threshold
        names[own] = "the gate's own"
    if len(log.thresholds) == 1:
        [used] = log.thresholds
        names[used] = "as it ran"
    return names


def _get_gate_threshold(log: LoggedTraffic, gate: str) -> float:
    """Return the threshold that a gate would use. Raise BadSetting if the log was made with another gate."""
    loaded = load_gate(gate)
    if loaded.name not in log.gates:
        raise BadSetting(
            f"the log was made with gate {', '.join(log.gates)}, but --gate names '{gate}' ({loaded.name}). A threshold "
            "applies to one gate only. Leave --gate out, or name the gate of the log."
        )
    return loaded.threshold


def _build_table(
    results: Sequence[replay.ReplayResult], names: dict[float, str], risk_title: str, *, with_money: bool
) -> TextTable:
    """Build the table of what each threshold would have saved and risked.

    The risk comes first, because narrow terminals drop the last columns.

    Args:
        results: One row for each threshold. Always retrieving has a threshold below 0.
        names: Notes on some thresholds, such as {0.5: "as it ran"}.
        risk_title: Title of the column of risks.
        with_money: Add a column for the money saved.
    """
    rows = []
    for result in results:
        label = "always" if result.threshold < 0 else f"{result.threshold:g}"
        if result.threshold in names:
            label += f" ({names[result.threshold]})"
        cells = {"threshold": label, **_format_result(result, risk_title)}
        if with_money:
            cells["money saved"] = _format_saving(result.savings["money"])
        rows.append(cells)
    return TextTable("", tuple(rows[0]), tuple(tuple(cells.values()) for cells in rows))


def _format_result(result: replay.ReplayResult, risk_title: str) -> dict[str, str]:
    """Format the risk and the savings of a threshold, by column."""
    return {
        "retrieved": f"{result.rate:.1%}",
        "retrievals saved": _format_saving(result.savings["retrievals"]),
        "both answers recorded": _format_known(result),
        risk_title: _format_share(result.risk),
        "tokens saved": _format_saving(result.savings["tokens"]),
        "seconds saved": _format_saving(result.savings["seconds"], " s"),
    }


def _format_known(result: replay.ReplayResult) -> str:
    """Format how many skipped questions have both answers, as '30 of 120 (25%)'.

    The risk is known only for these questions.
    """
    saving = result.savings["retrievals"]
    # `saving.always` is the number of questions, because always retrieving searches once for each.
    n_skipped = 0 if saving is None else round(saving.always) - result.retrieved
    if not n_skipped:
        return "-"
    return f"{result.known:,} of {n_skipped:,} ({result.known / n_skipped:.0%})"


def _format_saving(saving: replay.SavedAmount | None, unit: str = "") -> str:
    """Format a saving against always retrieving, as '12 s (40%)'. A loss is '3 s more (10%)', an unknown amount '-'."""
    if saving is None:
        return "-"
    saved = round(saving.saved, 9)
    size = abs(saved)
    amount = f"{size:,.0f}{unit}" if size >= 100 else f"{size:.3g}{unit}"
    if saved < 0:
        amount += " more"
    return f"{amount} ({size / saving.always:.0%})" if saving.always else amount


def _format_share(share: Estimate) -> str:
    return "unknown" if share.value is None else f"{share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"


def print_log_summary(log: LoggedTraffic, traffic: replay.Traffic) -> None:
    """Print which questions the results cover, which lines were left out, and which costs are assumed."""
    n = len(log.events)
    arbiter = f" with the arbiter {log.arbiter}" if log.arbiter else ""
    few = f" Fewer than {replay.MIN_KNOWN_QUESTIONS} prove little." if n < replay.MIN_KNOWN_QUESTIONS else ""
    inform(f"{n} questions decided by the gate {', '.join(log.gates)}{arbiter} for {', '.join(log.models)}.{few}")
    if log.bad_lines:
        inform(f"Lines left out: {log.describe_bad_lines()}.")
    if log.left_out:
        inform("Rows left out: " + ", ".join(f"{count} {reason}" for reason, count in log.left_out.items()) + ".")
    _print_assumed_costs(log, traffic)
    if log.constant_decision:
        inform(f"The gate {log.constant_decision} and has no threshold.")
    elif not traffic.has_both_answers:
        inform("Lost answers are unknown, because no question has both answers. Serve with --shadow --audit 1.")


def _print_assumed_costs(log: LoggedTraffic, traffic: replay.Traffic) -> None:
    """Print for how many questions costs are recorded or estimated, unless all are recorded."""
    n_skip_costs = traffic.count_known("cost_if_skipped")
    n_retrieval_costs = traffic.count_known("cost_if_retrieved")
    if min(n_skip_costs, n_retrieval_costs) < len(log.events):
        counts = f"{n_retrieval_costs} have recorded costs with a search, {n_skip_costs} without a search"
        inform(f"Of these questions, {counts}. For the others, the mean of the recorded costs is assumed.")
    if log.n_estimated:
        inform(f"Prompt tokens are estimated from the text for {log.n_estimated} of them.")


def _make_replay_record(
    log: LoggedTraffic, results: Sequence[replay.ReplayResult], prices: replay.Prices, names: dict[float, str]
) -> dict[str, Any]:
    """Build the JSON object that `knowgate replay --json` prints."""
    return {
        "log": str(log.path),
        "questions": len(log.events),
        "gate": ", ".join(log.gates),
        "model": ", ".join(log.models),
        "bad_lines": {reason: len(numbers) for reason, numbers in log.bad_lines.items()},
        "left_out": log.left_out,
        "estimated_prompts": log.n_estimated,
        "prices": prices.to_dict(),
        "thresholds": [{**asdict(result), "mark": names.get(result.threshold, "")} for result in results],
    }


ASSUMED_PRICES = replay.Prices(
    search=DEFAULT_SEARCH_PRICE, input_token=DEFAULT_TOKEN_PRICE, output_token=DEFAULT_TOKEN_PRICE
)
ASSUMED_PRICES_MESSAGE = "These are default prices in US dollars. Set your own: --price-search, --price-llm-call."


class CostOptions(TrafficOptions):
    """Options of `knowgate cost`, besides prices."""

    threshold: Share | None = option(
        None, "Retrieve if the gate's score is above this threshold. Default: the threshold of the gate or of the log."
    )
    prices: Path | None = option(
        None, "TOML file with prices: search, llm_call, input_token, output_token, gpu_hour.", metavar="FILE"
    )


def cost_command(log: LogArgument, price_flags: replay.Prices, options: CostOptions) -> None:
    """Compare the cost of 1,000 questions with always retrieving, never retrieving, and a gate.

    Also prints what the gate saves and the break-even price. The gate is cheaper if a search costs more than this
    price. Money is in the currency of your prices.

    Example: knowgate cost traffic.jsonl --prices prices.toml
    """
    prices = _load_prices(options.prices, price_flags)
    are_assumed = prices is ASSUMED_PRICES
    logged = read_traffic(log, options)
    traffic = replay.Traffic(logged.events)
    threshold = _choose_threshold(logged, options)
    comparison = compare_traffic_costs(traffic, threshold, prices)
    lacks_token_counts = bool(comparison.always.missing_amounts(prices))
    if are_assumed and lacks_token_counts:  # prices of tokens cannot be applied, so only the cost of searches is shown
        comparison = replace(comparison, prices=replay.Prices(search=DEFAULT_SEARCH_PRICE))
    if options.as_json:
        print_json(_make_cost_record(logged, comparison, threshold))
    else:
        currency = "US dollars" if are_assumed else "the currency of your prices"
        # A judge is a model of its own, which runs for every question.
        judges = [name for name in (options.gate, *logged.gates, logged.arbiter) if name and has_judge(name)]
        judge_note = f" {NOT_COUNTED}" if judges else ""
        print_text(f"{describe_saving(comparison, currency)} {describe_break_even(comparison)}{judge_note}")
        print_tables([build_cost_table(comparison, threshold, currency)])
    if are_assumed:
        inform(ASSUMED_PRICES_MESSAGE)
    print_log_summary(logged, traffic)


def _load_prices(file: Path | None, flags: replay.Prices) -> replay.Prices:
    """Read the prices of a file and of flags. Flags take precedence. Without any, prices are assumed."""
    given = get_set_fields(flags)
    if file is None and not given:
        return ASSUMED_PRICES
    file_prices = read_prices(file) if file else replay.Prices()
    return file_prices.replace(**given)


def _choose_threshold(log: LoggedTraffic, options: CostOptions) -> float:
    """Return the threshold of the user, of the gate, or of the log, in this order.

    Raises:
        BadSetting: The user gave neither a threshold nor a gate, and the log ran with several thresholds or none.
    """
    if options.threshold is not None:
        return options.threshold
    named = name_thresholds(log, options.gate)
    if not named:
        used = ", ".join(f"{value:g}" for value in sorted(log.thresholds)) or "none"
        raise BadSetting(f"the log has decisions at these thresholds: {used}. Choose one with --threshold.")
    return next(iter(named))  # the gate's own comes first


def build_cost_table(comparison: CostComparison, threshold: float, currency: str) -> TextTable:
    """Build the table of costs, with one row each for always retrieving, never retrieving, and the gate.

    Columns without any known amount are left out.

    Args:
        comparison: Costs per question of always retrieving, never retrieving and using a gate.
        threshold: Threshold of the gate, for the title.
        currency: Name of the currency, for the title.
    """
    rows = [_format_cost(cost, comparison.prices) for cost in comparison.policies.values()]
    known = [column for column in rows[0] if any(row[column] != UNKNOWN_AMOUNT for row in rows)]
    cells = [(name, *(row[column] for column in known)) for name, row in zip(comparison.policies, rows, strict=True)]
    title = f"Per {COST_QUESTIONS:,} questions, gated at the threshold {threshold:g}, money in {currency}"
    return TextTable(title, ("", *known), tuple(cells))


def _format_cost(cost: replay.PolicyCost, prices: replay.Prices) -> dict[str, str]:
    """Format the cost of one policy, such as always retrieving, as a row of the table, by column."""
    money = "money" if prices.include_llm else "money, searches only"
    return {
        money: _format(cost.money(prices), "{:,.4g}"),
        "searches": _format(cost.searches),
        "LLM calls": _format(cost.calls),
        "right, against always": _format(cost.change, "{:+,.1f}"),
        "lost": _format(cost.lost.value if cost.lost else None, "{:,.1f}"),
        "tokens read": _format(cost.prompt),
        "tokens written": _format(cost.completion),
        "GPU seconds": _format(cost.gpu),
    }


def _format(amount: float | None, template: str = "{:,.0f}") -> str:
    """Format an amount per question as an amount per `COST_QUESTIONS` questions."""
    return UNKNOWN_AMOUNT if amount is None else template.format(COST_QUESTIONS * amount)


def describe_saving(comparison: CostComparison, currency: str) -> str:
    """Say what the gate saves, and which right answers it loses and gains."""
    text = f"The gate skips {comparison.searches:.0%} of the searches."
    text += _describe_saved_money(comparison, currency)
    lost, gained = comparison.gated.lost, comparison.gated.gained
    if lost is None or gained is None:  # the answers are not graded
        return text
    counts = f"{lost.hits:,} lost and {gained.hits:,} gained among {lost.n:,} graded questions"
    change = f"{_format(comparison.gated.change, '{:+,.1f}')} per {COST_QUESTIONS:,} questions"
    return f"{text} Right answers, against always retrieving: {change} ({counts})."


def _describe_saved_money(comparison: CostComparison, currency: str) -> str:
    """Say how much money the gate saves or costs; '' if that is unknown."""
    always_cost = comparison.always.money(comparison.prices)
    gated_cost = comparison.gated.money(comparison.prices)
    if always_cost is None or gated_cost is None:
        return ""
    saved = COST_QUESTIONS * (always_cost - gated_cost)
    verb = "saves" if saved >= 0 else "costs"
    scope = "" if comparison.prices.include_llm else " in searches"
    return f" In all, it {verb} {abs(saved):,.4g}{scope} per {COST_QUESTIONS:,} questions, in {currency}."


def describe_break_even(comparison: CostComparison) -> str:
    """Say at which price of a search the gate is cheaper than always retrieving. If the price is unknown, say why."""
    prices = comparison.prices
    if comparison.break_even is not None:
        return f"The gate is cheaper if a search costs more than {comparison.break_even:.3g}."
    if not prices.include_llm:
        return _describe_unpriced_calls(comparison)
    missing = [*comparison.always.missing_amounts(prices), *comparison.gated.missing_amounts(prices)]
    if not missing:  # the log records all amounts that have a price
        return "The gate skips no search at this threshold, so it is never cheaper."
    flags = " ".join(f"--price-{name.replace('_', '-')} 0" for name in dict.fromkeys(missing))
    return (
        "The total is unknown, because the log does not record some amounts that have a price. To leave "
        f"these amounts out, set their prices to 0: {flags}."
    )


def _describe_unpriced_calls(comparison: CostComparison) -> str:
    """Say that the costs leave out LLM calls, and how to set their price."""
    text = "The money leaves out LLM calls, which have no price."
    if comparison.gated.calls is not None:
        text += f" The gate makes {comparison.gated.calls:.2f} LLM calls per question where always retrieving makes 1."
    if comparison.break_even_call:
        text += f" It is cheaper if a call costs less than {comparison.break_even_call:.3g}."
    return f"{text} Set a price with --price-llm-call or, if the log records tokens, --price-token."


def _make_cost_record(log: LoggedTraffic, comparison: CostComparison, threshold: float) -> dict[str, Any]:
    """Build the JSON object that `knowgate cost --json` prints."""
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
