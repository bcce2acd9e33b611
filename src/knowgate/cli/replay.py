"""`knowgate replay`: show what other thresholds would have saved and risked on logged traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from knowgate.cli.console import inform, print_json, print_tables
from knowgate.cli.options import parse_log_location
from knowgate.core.display import TextTable
from knowgate.core.postgres.address import DatabaseAddress
from knowgate.errors import BadSetting
from knowgate.evaluation import replay
from knowgate.evaluation.server_log import is_server_log, read_server_log
from knowgate.evaluation.traffic_log import LoggedTraffic, read_label_run_traffic, read_traffic_log
from knowgate.gates import load_gate
from knowgate.stats.proportions import Proportion

LogArgument = Annotated[
    str,
    typer.Argument(
        metavar="LOG",
        help="Output of `knowgate ask --json`, the decision log of the server (`serve --decisions`), or a label run.",
    ),
]
ArbiterOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|rules|none",
        help="Arbiter that chooses between the answers of a label run with and without passages. [default: the "
        "policy's]",
    ),
]
# Column titles by how both answers are known. "Differ" means that the answers with and without passages disagree;
# "lost" means that only the answer with passages is correct.
RISK_COLUMNS = {
    "retrieved": "differ, of {} retrieved",
    "audited": "differ, of {} audited",
    "graded": "lost, of {} graded",
}


def replay_command(
    log: LogArgument,
    prices: replay.Prices,
    gate: Annotated[
        str | None,
        typer.Option(
            help="Gate to replay. Required for a label run. For a log, a fitted gate adds a row for its own threshold."
        ),
    ] = None,
    arbiter: ArbiterOption = None,
    arm: Annotated[
        str | None,
        typer.Option(
            metavar="a|b",
            help="Server logs only: arm of an A/B test whose decisions to replay. Default: the gate that decided most.",
        ),
    ] = None,
    thresholds: Annotated[
        str, typer.Option(help="Thresholds to try: a range in steps of 0.1 (0.1..0.9), or a list.")
    ] = "0.1..0.9",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Show what each threshold would have saved and risked on logged traffic, compared with always retrieving.

    On a log, the risk is the share of questions whose answers with and without passages disagree, which is weak
    evidence. It is unknown for thresholds with fewer than 100 such pairs of answers. On a label run, the risk is the
    share of correct answers lost.

    Example: knowgate replay traffic.jsonl --thresholds 0.2,0.4,0.6 --price-search 0.001
    """
    requested = parse_thresholds(thresholds)
    logged = read_traffic(parse_log_location(log), gate, arbiter, arm)
    names = name_thresholds(logged, gate)
    traffic = replay.Traffic(logged.events)
    results = replay.replay_traffic(traffic, [*requested, *names], prices)
    if as_json:
        print_json(_make_record(logged, results, prices, names))
    else:
        print_tables([_build_table(results, names, with_money=prices.are_given)])
    print_log_summary(logged, traffic)
    if prices.are_given and not prices.include_llm and any(_makes_extra_calls(result) for result in results):
        inform("Of the money saved, extra LLM calls are not priced (--price-llm-call).")
    if any(not result.has_evidence for result in results):
        inform(
            f"The risk of a threshold is unknown if fewer than {replay.MIN_KNOWN_QUESTIONS} skipped questions have both answers. "
            "Do not choose such a threshold from this log: first collect more answers (knowgate serve --audit 0.1 --shadow)."
        )


def parse_thresholds(text: str) -> list[float]:
    """Parse thresholds written as a range in steps of 0.1 ('0.1..0.9') or as a list ('0.25,0.5').

    Raises:
        BadSetting: The text is neither, or a threshold is outside 0 to 1.
    """
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
        raise BadSetting(
            f"--thresholds '{text}' is not valid. Give a range such as 0.1..0.9, or numbers from 0 to 1: 0.25,0.5"
        )
    return values


def read_traffic(
    log: Path | DatabaseAddress, gate: str | None, arbiter: str | None = None, arm: str | None = None
) -> LoggedTraffic:
    """Read logged traffic: output of `ask --json`, a decision log of the server, or a label run.

    Args:
        log: File, folder or database of the log.
        gate: Gate that decides the questions of a label run; ignored for other logs.
        arbiter: Arbiter that chooses between the two answers of a label run; None for that of the policy.
        arm: Arm of an A/B test ('a' or 'b') whose decisions to read. Server logs only.
    """
    if arbiter is not None and not (isinstance(log, Path) and log.is_dir()):
        raise BadSetting("--arbiter needs a label run: a log does not record both answers. Leave --arbiter out.")
    if not isinstance(log, Path) or is_server_log(log):
        return read_server_log(log, arm)
    if arm is not None:
        raise BadSetting("--arm needs a decision log of the server: other logs have one gate only. Leave --arm out.")
    if not log.is_dir():
        return read_traffic_log(log)
    if gate is None:
        raise BadSetting(
            f"'{log}' is a label run, which needs a gate to decide on its questions. Fit a policy: knowgate fit --labels "
            f"{log} --out my-policy. Then set --gate my-policy."
        )
    return read_label_run_traffic(log, gate, arbiter)


def name_thresholds(log: LoggedTraffic, gate: str | None) -> dict[float, str]:
    """Return the thresholds that deserve a note in the table, each with its note.

    These are the threshold of `gate` ("the gate's own") and the one that the log ran with ("as it ran"), for example
    {0.4: "the gate's own", 0.5: "as it ran"}. A log that ran with several thresholds gets no note.
    """
    names = dict.fromkeys(log.thresholds, "as it ran") if len(log.thresholds) == 1 else {}
    if gate is None:
        return names
    own = log.own_threshold if log.own_threshold is not None else _get_gate_threshold(log, gate)
    return {own: "the gate's own", **names}


def _get_gate_threshold(log: LoggedTraffic, gate: str) -> float:
    """Return the own threshold of a gate. Raises BadSetting if the log was made with another gate."""
    loaded = load_gate(gate)
    if loaded.name not in log.gates:
        raise BadSetting(
            f"the log was made with the gate {', '.join(log.gates)}, not with '{gate}' ({loaded.name}). A threshold "
            "applies to one gate only. Leave --gate out, or name the gate of the log."
        )
    return loaded.threshold


def _build_table(results: Sequence[replay.ReplayResult], names: dict[float, str], *, with_money: bool) -> TextTable:
    """Build the table with one row per threshold.

    Narrow terminals drop columns from the right, so risks come before all savings except searches.

    Args:
        results: What each threshold would have saved and risked. The threshold of always retrieving is below 0.
        names: Notes on some thresholds, such as {0.5: "as it ran"}.
        with_money: Add a column for the money saved.
    """
    risk_titles = {name: RISK_COLUMNS[name].format(share.n) for name, share in results[0].risks.items()}
    amounts = ["tokens", "seconds", *(["money"] if with_money else [])]
    columns = ["threshold", "retrieved", "retrievals saved", "answers known", *risk_titles.values()]
    columns += [f"{amount} saved" for amount in amounts]
    rows = []
    for result in results:
        label = "always" if result.threshold < 0 else f"{result.threshold:g}"
        if result.threshold in names:
            label += f" ({names[result.threshold]})"
        cells = [label, f"{result.rate:.1%}", _format_saving(result.savings["retrievals"]), _format_known(result)]
        cells += [_format_share(result.risks[name]) for name in risk_titles]
        cells += [_format_saving(result.savings[amount], " s" * (amount == "seconds")) for amount in amounts]
        rows.append(tuple(cells))
    return TextTable("", tuple(columns), tuple(rows))


def _format_known(result: replay.ReplayResult) -> str:
    """Format on how many of the skipped questions the risk is measured, as '30 of 120 (25%)'; '-' if none is skipped.

    The risk of skipping a search is known only for questions that have answers both with and without passages.
    """
    saving = result.savings["retrievals"]
    n_skipped = 0 if saving is None else round(saving.saved)
    return f"{result.known:,} of {n_skipped:,} ({result.known / n_skipped:.0%})" if n_skipped else "-"


def _makes_extra_calls(result: replay.ReplayResult) -> bool:
    """Return whether the gate is known to make more LLM calls than always retrieving."""
    calls = result.savings["llm_calls"]
    return calls is not None and calls.saved < 0


def _format_saving(saving: replay.SavedAmount | None, unit: str = "") -> str:
    """Format how much less, or more, is used than by always retrieving, as '12 s (40%)' or '3 s more (10%)'.

    The percentage is relative to what always retrieving uses. An unknown amount is '-'.
    """
    if saving is None:
        return "-"
    saved = round(saving.saved, 9)
    amount = f"{abs(saved):,.0f}" if abs(saved) >= 100 else f"{abs(saved):.3g}"
    amount += f"{unit} more" if saved < 0 else unit
    return f"{amount} ({abs(saved) / saving.always:.0%})" if saving.always else amount


def _format_share(share: Proportion) -> str:
    return "unknown" if share.value is None else f"{share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"


def print_log_summary(log: LoggedTraffic, traffic: replay.Traffic) -> None:
    """Print how many questions the numbers are based on, what was left out, and what was estimated."""
    n = len(log.events)
    arbiter = f" with the arbiter {log.arbiter}" if log.arbiter else ""
    few = f" Fewer than {replay.MIN_KNOWN_QUESTIONS} prove little." if n < replay.MIN_KNOWN_QUESTIONS else ""
    inform(f"{n} questions decided by the gate {', '.join(log.gates)}{arbiter} for {', '.join(log.models)}.{few}")
    if log.bad_lines:
        inform(f"Lines left out: {log.describe_bad_lines()}.")
    if log.left_out:
        inform("Rows left out: " + ", ".join(f"{count} {reason}" for reason, count in log.left_out.items()) + ".")
    n_skip_costs, n_retrieval_costs = traffic.count_known("closed"), traffic.count_known("opened")
    if min(n_skip_costs, n_retrieval_costs) < n:
        counts = f"with a search are recorded for {n_retrieval_costs} of them, costs without one for {n_skip_costs}"
        inform(f"Costs {counts}. For the rest, the mean of these is assumed.")
    if log.n_estimated:
        inform(f"Prompt tokens are estimated from the text for {log.n_estimated} of them.")
    if not traffic.checks:
        inform("Lost answers are unknown: no question has both answers. Serve with --audit 0.1, or use a label run.")


def _make_record(
    log: LoggedTraffic, results: Sequence[replay.ReplayResult], prices: replay.Prices, names: dict[float, str]
) -> dict[str, Any]:
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
