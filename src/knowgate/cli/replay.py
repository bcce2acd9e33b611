"""`knowgate replay`: what other thresholds would have saved and risked on logged traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from knowgate.cli.console import STDERR_CONSOLE, print_json, print_tables
from knowgate.cli.options import parse_log_location
from knowgate.core.display import TextTable
from knowgate.core.postgres.address import DatabaseAddress
from knowgate.errors import BadSetting
from knowgate.evaluation.replay import Prices, ThresholdResult, Traffic, TrafficSaving, replay_traffic
from knowgate.evaluation.server_log import is_server_log, read_server_log
from knowgate.evaluation.traffic_log import LoggedTraffic, format_bad_lines, read_label_run_traffic, read_traffic_log
from knowgate.gates import load_gate
from knowgate.stats.proportions import Proportion

RISK_COLUMNS = {
    "retrieved": "differ, of {} retrieved",
    "audited": "differ, of {} audited",
    "graded": "lost, of {} graded",
}


def replay_command(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG",
            help="Lines of `knowgate ask --json`, a label run folder, or the server's log (--decisions).",
        ),
    ],
    gate: Annotated[
        str | None,
        typer.Option(help="For a label run: the gate to try. For a log: a fitted gate whose threshold to add."),
    ] = None,
    arbiter: Annotated[
        str | None,
        typer.Option(metavar="DIR|rules", help="For a label run: who chooses after retrieval; a log says so itself."),
    ] = None,
    arm: Annotated[
        str | None,
        typer.Option(metavar="a|b", help="For the server's log: decisions of this arm. Default: the commonest gate's."),
    ] = None,
    thresholds: Annotated[str, typer.Option(help="As 0.1..0.9 (steps of 0.1) or 0.25,0.5,0.75.")] = "0.1..0.9",
    price_retrieval: Annotated[float, typer.Option(help="Price of one search.")] = 0.0,
    price_input_token: Annotated[float, typer.Option(help="Price of one prompt token, e.g. 3e-7.")] = 0.0,
    price_output_token: Annotated[float, typer.Option(help="Price of one generated token, e.g. 1.2e-6.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
) -> None:
    """Show what each threshold would have saved and risked on logged traffic, against always retrieving.

    Risk on a log is weak: answers with and without passages that disagree. On a label run it is graded.

    Example: knowgate replay traffic.jsonl --thresholds 0.2,0.4,0.6 --price-retrieval 0.001
    """
    prices = Prices(price_retrieval, price_input_token, price_output_token)
    tried = parse_thresholds(thresholds)
    place = parse_log_location(log)
    if arbiter is not None and not (isinstance(place, Path) and place.is_dir()):
        raise BadSetting("--arbiter goes with a label run; the lines of a log hold the answers that were given.")
    logged = read_traffic(place, gate, arbiter, arm)
    marks = name_thresholds(logged, gate)
    traffic = Traffic(logged.events)
    lines = replay_traffic(traffic, [*tried, *marks], prices)
    if as_json:
        print_json(_record(logged, lines, prices, marks))
    else:
        print_tables([_table(lines, marks, prices)])
    print_log_summary(logged, traffic)


def parse_thresholds(text: str) -> list[float]:
    """'0.1..0.9' in steps of 0.1, or a list."""
    first, dots, last = text.partition("..")
    try:
        if dots:
            low, high = round(float(first) * 10), round(float(last) * 10)
            values = [step / 10 for step in range(low, high + 1)]
        else:
            values = [float(part) for part in text.split(",")]
    except (ValueError, OverflowError):
        values = []
    if not values or not all(0 <= value <= 1 for value in values):
        raise BadSetting(f"--thresholds is '{text}'; write 0.1..0.9, or numbers between 0 and 1 as 0.25,0.5.")
    return values


def read_traffic(
    log: Path | DatabaseAddress, gate: str | None, arbiter: str | None = None, arm: str | None = None
) -> LoggedTraffic:
    """Lines of `ask --json`, the server's log, or a label run."""
    if not isinstance(log, Path) or is_server_log(log):
        return read_server_log(log, arm)
    if arm is not None:
        raise BadSetting("--arm goes with the server's log, other logs hold one gate: leave it away.")
    return read_label_run_traffic(log, gate, arbiter) if log.is_dir() else read_traffic_log(log)


def name_thresholds(log: LoggedTraffic, gate: str | None) -> dict[float, str]:
    """Thresholds with a name: the one the traffic ran with, and the one of --gate."""
    ran = dict.fromkeys(log.thresholds, "as it ran") if len(log.thresholds) == 1 else {}
    if gate is None:
        return ran
    own = log.own if log.own is not None else _own_threshold(log, gate)
    return {own: "the gate's own", **ran}


def _own_threshold(log: LoggedTraffic, gate: str) -> float:
    loaded = load_gate(gate)
    if loaded.name not in log.gates:
        raise BadSetting(
            f"the log holds needs of the gate {', '.join(log.gates)}, not of '{gate}' ({loaded.name}); "
            "a threshold means nothing for another gate's needs. Leave --gate away."
        )
    return loaded.threshold


def _table(lines: Sequence[ThresholdResult], marks: dict[float, str], prices: Prices) -> TextTable:
    kinds = ["retrievals", "tokens", "seconds", *(["money"] if prices.are_given else [])]
    risks = {name: RISK_COLUMNS[name].format(share.n) for name, share in lines[0].risks.items()}
    rows = []
    for line in lines:
        name = "always" if line.threshold < 0 else f"{line.threshold:g}"
        mark = f" ({marks[line.threshold]})" if line.threshold in marks else ""
        saved = [_saving(line.savings[kind]) for kind in kinds]
        rows.append(
            (name + mark, f"{line.rate:.1%}", saved[0], *(_share(line.risks[name]) for name in risks), *saved[1:])
        )
    first, *others = (f"{kind} saved" for kind in kinds)
    columns = ("threshold", "retrieved", first, *risks.values(), *others)  # the risk has room on any terminal
    return TextTable("", columns, tuple(rows))


def _saving(saving: TrafficSaving | None) -> str:
    if saving is None:
        return "-"
    share = f" ({saving.saved / saving.always:.0%})" if saving.always else ""
    return (f"{saving.saved:,.0f}" if abs(saving.saved) >= 100 else f"{saving.saved:.3g}") + share


def _share(share: Proportion) -> str:
    return "-" if share.value is None else f"{share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"


def print_log_summary(log: LoggedTraffic, traffic: Traffic) -> None:
    """What the numbers rest on."""
    n = len(log.events)
    STDERR_CONSOLE.print(f"{n} questions of the gate {', '.join(log.gates)} on {', '.join(log.models)}.")
    if log.bad:
        STDERR_CONSOLE.print(f"Lines left out: {format_bad_lines(log)}.")
    if log.left_out:
        STDERR_CONSOLE.print(
            "Rows left out: " + ", ".join(f"{count} {reason}" for reason, count in log.left_out.items()) + "."
        )
    known = {way: traffic.known(way) for way in ("closed", "opened")}
    if min(known.values()) < n:
        STDERR_CONSOLE.print(
            f"What retrieving costs is on record for {known['opened']} of them, what skipping costs for "
            f"{known['closed']}; the others are taken at the mean."
        )
    if log.estimated:
        STDERR_CONSOLE.print(f"Prompt tokens are estimated from the text for {log.estimated} of them.")
    if not traffic.checks:
        STDERR_CONSOLE.print(
            "No question has both answers, so the risk is unknown: use a gate that drafts, or a label run."
        )


def _record(
    log: LoggedTraffic, lines: Sequence[ThresholdResult], prices: Prices, marks: dict[float, str]
) -> dict[str, Any]:
    return {
        "log": str(log.path),
        "questions": len(log.events),
        "gate": ", ".join(log.gates),
        "model": ", ".join(log.models),
        "bad_lines": {reason: len(numbers) for reason, numbers in log.bad.items()},
        "left_out": log.left_out,
        "estimated_prompts": log.estimated,
        "prices": asdict(prices),
        "thresholds": [{**asdict(line), "mark": marks.get(line.threshold, "")} for line in lines],
    }
