"""`knowgate eval`: compare gates on the same questions."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from knowgate.cli.console import create_table_console, inform, print_json, print_page_location, print_text
from knowgate.cli.label import labeling_progress_bar
from knowgate.cli.options import GatesOption, path_option, split_gate_specs
from knowgate.cli.progress import show_arbitration_progress
from knowgate.core.options import Options, option
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.gate_evaluation import EvaluateOptions, evaluate
from knowgate.evaluation.report import report_folder
from knowgate.evaluation.report.evaluation_tables import build_evaluation_tables, build_summary_tables
from knowgate.evaluation.report.evaluation_verdict import build_verdict
from knowgate.evaluation.report.terminal import render_tables
from knowgate.gates.artifacts.drift import format_far_warning
from knowgate.integrations.experiment_trackers import check_trackers, log_to_mlflow, log_to_wandb
from knowgate.training.topics import describe_rules, propose_rules

SUMMARY_WIDTH = 100  # characters; the summary is not wider, so that it fits a terminal and a page
OptionalRuns = Annotated[
    list[Path] | None,
    path_option("RUN", "Label run (a folder made by `knowgate label`) to evaluate on; may be repeated.", "--labels"),
]


class TrackerOptions(Options):
    """Experiment trackers that `knowgate eval` logs to."""

    mlflow: bool = option(False, "Also log the results to MLflow, at MLFLOW_TRACKING_URI. Needs the extra mlflow.")
    wandb: bool = option(False, "Also log the results to Weights & Biases, in WANDB_PROJECT. Needs the extra wandb.")


def eval_(
    options: EvaluateOptions,
    report: report_folder.ReportOptions,
    trackers: TrackerOptions,
    runs: OptionalRuns = None,
    data: Annotated[
        str | None,
        typer.Option(help="Questions to answer now, instead of --labels: jsonl:FILE, or several with commas."),
    ] = None,
    gates: GatesOption = None,
    full: Annotated[bool, typer.Option("--full", help="Print all tables, not only the summary.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")] = False,
) -> None:
    """Compare gates and recommend one with a threshold.

    Prints the recommendation, then a table of all gates. --full adds tables of ranking, calibration and cost; they are
    also in the report (--out).

    Example: knowgate eval --labels runs/test --gates logprob:min,flare,my-fusion --out report
    """
    check_trackers(mlflow=trackers.mlflow, wandb=trackers.wandb)
    if options.out is not None:
        report_folder.check_report_folder(options.out)  # fail before the evaluation, not after it
    if "price_wrong" in options.model_fields_set:  # the price of a wrong answer is compared with that of a search
        options = options.replace(price_search=report.price_search)
    progress_bar = labeling_progress_bar() if data else nullcontext(lambda progress: None)
    arbiter = None if options.arbiter is None else str(options.arbiter)
    specs = split_gate_specs(gates, runs or ())
    with progress_bar as on_progress, show_arbitration_progress(arbiter) as on_arbitrated:
        evaluation = evaluate(
            specs,
            runs or None,
            data=data or None,
            options=options,
            on_progress=on_progress,
            on_arbitrated=on_arbitrated,
        )
    _print_warnings(evaluation)
    _print_evaluation(evaluation, report, full=full, as_json=as_json)
    if options.out is not None:
        report_folder.write_report(evaluation, options.out, options=report)
        if report.html:
            print_page_location(options.out / report_folder.PAGE_FILE)
    _log_to_trackers(evaluation, trackers)
    if data is not None:
        command = f"knowgate eval {_list_runs(evaluation)}"
        inform(f"Answers and decisions are stored. Evaluate again without the LLM: {command}")


def _list_runs(evaluation: Evaluation) -> str:
    """Return the flags that name the label runs of an evaluation."""
    return " ".join(f"--labels {run}" for run in evaluation.table.runs)


def _log_to_trackers(evaluation: Evaluation, trackers: TrackerOptions) -> None:
    """Log the results to the requested experiment trackers, if any, and print the run ids."""
    if trackers.mlflow:
        inform(f"Logged to MLflow as run {log_to_mlflow(evaluation)}.")
    if trackers.wandb:
        inform(f"Logged to Weights & Biases as run {log_to_wandb(evaluation)}.")


def _print_warnings(evaluation: Evaluation) -> None:
    """Print caveats of the data, and a warning for each gate that was fitted on very different questions."""
    n = len(evaluation.table.rows)
    warnings = evaluation.table.list_caveats()
    # The warning is empty if few questions are far from the gate's training questions.
    warnings += [format_far_warning(gate.gate, gate.scores.far, n) for gate in evaluation.gates]
    for warning in warnings:
        if warning:
            inform(warning, style="yellow")


def _print_evaluation(
    evaluation: Evaluation, report: report_folder.ReportOptions, *, full: bool, as_json: bool
) -> None:
    """Print the recommendation, what to do next, and the tables; with `as_json`, one JSON object instead.

    Args:
        evaluation: The results of all gates.
        report: Prices, and the loss of right answers that the user accepts.
        full: Print all tables instead of the summary.
        as_json: Print JSON instead of text.
    """
    if as_json:
        print_json(report_folder.build_summary(evaluation, report))
        return
    verdict = build_verdict(evaluation, report, report.max_loss)
    print_text(f"{verdict.label}: {verdict.text} {verdict.note or ''}".rstrip())
    if not evaluation.ranking_gates and evaluation.has_open_answers:
        inform(f"Next: knowgate fit {_list_runs(evaluation)} --out my-policy")
    if verdict.level in ("saves", "may-save") and verdict.costs.money is None:
        inform("To see whether it pays, set the price of an LLM call: --price-llm-call PRICE.")
    if rules := describe_rules(propose_rules(evaluation.topics)):
        print_text(f"{rules} Write them to a file: knowgate report RUN --topic-rules FILE")
    tables = build_evaluation_tables(evaluation) if full else build_summary_tables(evaluation)
    create_table_console(None if full else SUMMARY_WIDTH).print(Text(), render_tables(tables))
    if not full:
        inform("More tables: --full, or the report (--out DIR).")
