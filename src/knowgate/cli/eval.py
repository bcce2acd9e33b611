"""`knowgate eval` compares gates on the same questions; `knowgate compare` compares two evaluations."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from knowgate.cli.console import create_wide_console, inform, print_json, print_tables, print_text
from knowgate.cli.label import LabelProgressBar
from knowgate.cli.options import GatesOption, path_argument, path_option, split_gate_specs
from knowgate.cli.progress import show_progress
from knowgate.core.options import Options, Share, WholeNumber, option
from knowgate.evaluation.evaluation_diff import EvaluationDiff, diff_evaluations, diff_to_dict
from knowgate.evaluation.evaluation_summary import load_evaluation_summary
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.gate_evaluation import EvaluateOptions, evaluate
from knowgate.evaluation.report import diff_report, report_folder
from knowgate.evaluation.report.evaluation_tables import build_evaluation_tables, build_summary_tables
from knowgate.evaluation.report.evaluation_verdict import build_verdict, format_point_count
from knowgate.evaluation.report.terminal import render_tables
from knowgate.gates.artifacts.drift import format_far_warning
from knowgate.integrations.experiment_trackers import import_tracker, log_to_mlflow, log_to_wandb
from knowgate.training.topics import describe_rules, propose_rules

SUMMARY_WIDTH = 100  # characters; the summary is not wider, so that it fits a terminal and a page


class OutputOptions(Options):
    """Where `knowgate eval` gets its questions from, and what it prints and logs."""

    data: str | None = option(
        None, "Questions to answer now. They replace --labels. Example: jsonl:FILE. Several are separated by commas."
    )
    full: bool = option(False, "Print all tables, not only the summary.", flag="--full")
    as_json: bool = option(False, "Print one JSON object instead of the tables.", flag="--json")
    mlflow: bool = option(False, "Also log the results to MLflow, at MLFLOW_TRACKING_URI. Needs the extra mlflow.")
    wandb: bool = option(False, "Also log the results to Weights & Biases, in WANDB_PROJECT. Needs the extra wandb.")


def eval_(
    options: EvaluateOptions,
    report: report_folder.ReportOptions,
    output: OutputOptions,
    runs: Annotated[
        list[Path] | None,
        path_option("RUN", "Folder of recorded answers (label run) to evaluate gates on. Repeatable.", "--labels"),
    ] = None,
    gates: GatesOption = None,
) -> None:
    """Compare gates and recommend one with a threshold.

    Prints the recommendation, then a table of all gates. --full adds tables of ranking, calibration and cost. The
    report (--out) has all tables.

    Example: knowgate eval --labels runs/test --gates logprob:min,flare,my-fusion --out report
    """
    for tracker in ("mlflow", "wandb"):
        if getattr(output, tracker):
            import_tracker(tracker)  # fail before the evaluation, not after it
    if options.out is not None:
        report_folder.check_report_folder(options.out)
    if "price_wrong" in options.model_fields_set:
        # The price of a wrong answer is compared with that of a search, which is an option of the report.
        options = options.replace(price_search=report.price_search)
    specs = split_gate_specs(gates, runs or ())
    evaluation = _evaluate_with_progress(specs, runs, output.data, options)
    _print_warnings(evaluation)
    if output.as_json:
        print_json(report_folder.build_summary(evaluation, report))
    else:
        _print_evaluation(evaluation, report, full=output.full)
    if options.out is not None:
        _write_report(evaluation, options.out, report)
    _log_evaluation(evaluation, output)


def _write_report(evaluation: Evaluation, out: Path, options: report_folder.ReportOptions) -> None:
    """Write the report of an evaluation to a folder, and print where its page is."""
    report_folder.write_report(evaluation, out, options=options)
    if options.html:
        inform(f"Page: {(out / report_folder.PAGE_FILE).resolve()}")


def _evaluate_with_progress(
    specs: list[str], runs: list[Path] | None, data: str | None, options: EvaluateOptions
) -> Evaluation:
    """Evaluate gates on label runs or on new data, with a progress bar."""
    with show_progress("evaluating", "questions") as show:
        return evaluate(
            specs,
            runs or None,
            data=data or None,
            options=options,
            on_progress=LabelProgressBar(show),
            on_arbitrated=partial(show, stage="arbitrating"),
        )


def _log_evaluation(evaluation: Evaluation, output: OutputOptions) -> None:
    """Log an evaluation to MLflow or Weights & Biases, and print how to repeat it without the LLM."""
    if output.mlflow:
        inform(f"Logged to MLflow as run {log_to_mlflow(evaluation)}.")
    if output.wandb:
        inform(f"Logged to Weights & Biases as run {log_to_wandb(evaluation)}.")
    if output.data is not None:
        command = f"knowgate eval {_list_runs(evaluation)}"
        inform(f"Answers and decisions are stored. Evaluate again without the LLM: {command}")


def _list_runs(evaluation: Evaluation) -> str:
    """Return the flags that name the label runs of an evaluation."""
    return " ".join(f"--labels {run}" for run in evaluation.table.runs)


def _print_warnings(evaluation: Evaluation) -> None:
    """Print caveats of the data, and warn about gates fitted on very different questions."""
    n_questions = len(evaluation.table.rows)
    warnings = evaluation.table.list_caveats()
    # The warning is empty if few questions are far from the gate's training questions.
    warnings += [format_far_warning(gate.gate, gate.scores.far, n_questions) for gate in evaluation.gates]
    for warning in warnings:
        if warning:
            inform(warning, style="yellow")


def _print_evaluation(evaluation: Evaluation, report: report_folder.ReportOptions, *, full: bool) -> None:
    """Print which gate is recommended, what to do next, and the tables.

    Args:
        evaluation: The results of all gates.
        report: Prices, and how many right answers the user accepts to lose, compared with always retrieving.
        full: Print all tables instead of the summary.
    """
    _print_recommendation(evaluation, report)
    rules = describe_rules(propose_rules(evaluation.topics))
    if rules:  # "" if no topic has a rule
        print_text(f"{rules} Write them to a file: knowgate report RUN --topic-rules FILE")
    if full:
        create_wide_console().print(Text(), render_tables(build_evaluation_tables(evaluation)))
    else:
        create_wide_console(SUMMARY_WIDTH).print(Text(), render_tables(build_summary_tables(evaluation)))
        inform("More tables: --full, or the report (--out DIR).")


def _print_recommendation(evaluation: Evaluation, report: report_folder.ReportOptions) -> None:
    """Print which gate is recommended, and what to do next."""
    verdict = build_verdict(evaluation, report, report.max_loss)
    print_text(f"{verdict.label}: {verdict.text} {verdict.note or ''}".rstrip())
    # Only the baselines were evaluated. A gate can be fitted if there are answers with passages (open-book answers).
    if not evaluation.ranking_gates and evaluation.has_open_answers:
        inform(f"Next: knowgate fit {_list_runs(evaluation)} --out my-policy")
    if verdict.level in ("saves", "may-save") and verdict.costs.money is None:
        inform("To see whether it pays, set the price of an LLM call: --price-llm-call PRICE.")


EXIT_WORSE = 3  # exit status of --fail-if-worse


class CompareOptions(Options):
    """Options of `knowgate compare`."""

    gate: list[str] = option(
        [],
        "Gate to compare. May be repeated. Default: the gates `never` and `always`, recommended gates, and "
        "gates with an arbiter.",
    )
    fail_if_worse: Share | None = option(
        None,
        "Exit with status 3 if a gate's accuracy is lower in the second evaluation by more than this share, and the "
        "whole interval of the difference is below 0.",
    )
    out: Path | None = option(None, "HTML file to write a page to. Default: no page.", metavar="FILE")
    html: bool = option(True, "Deprecated. To write no page, leave out --out.")
    resamples: WholeNumber = option(2_000, "Number of bootstrap resamples for the intervals.")


def compare(
    first: Annotated[Path, path_argument("A", "Evaluation folder written by `knowgate eval --out`, or a label run.")],
    second: Annotated[Path, path_argument("B", "Second evaluation folder or label run.")],
    options: CompareOptions,
    gates: GatesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Compare two evaluations A and B, such as before and after a change.

    Prints for each gate the difference from A to B, with intervals. Shared questions are compared one by one (paired)
    if there are enough. A label run is first evaluated with --gates.

    Example: knowgate compare report-main report-branch --fail-if-worse 0.01
    """
    specs = split_gate_specs(gates, (first, second))
    before = load_evaluation_summary(first, specs, options.resamples)
    after = load_evaluation_summary(second, specs, options.resamples)
    diff = diff_evaluations(before, after, options.gate, options.resamples)
    max_fall = options.fail_if_worse  # None to allow any fall of the accuracy
    worse_gates = [] if max_fall is None else diff.find_worse(max_fall)
    if as_json:
        print_json({**diff_to_dict(diff), "worse": worse_gates})
    else:
        _print_diff(diff)
    if options.out is not None and options.html:
        diff_report.write_diff_page(diff, options.out)
        inform(f"Page: {options.out.resolve()}")
    if max_fall is not None and worse_gates:
        _report_worse_gates(worse_gates, max_fall)
        raise typer.Exit(EXIT_WORSE)


def _report_worse_gates(gates: list[str], max_fall: float) -> None:
    """Print the names of gates whose accuracy fell by more than `max_fall`."""
    names = ", ".join(f"'{gate}'" for gate in gates)
    inform(f"Accuracy fell by more than {format_point_count(max_fall)}: {names}.", style="red")


def _print_diff(diff: EvaluationDiff) -> None:
    """Print the table of differences between two evaluations, and a verdict."""
    print_tables([diff_report.build_diff_table(diff, diff_report.select_gates(diff))])
    verdict = diff_report.build_diff_verdict(diff)
    notes = (diff_report.describe_pairing(diff), diff_report.describe_uncompared_gates(diff))
    print_text(" ".join(filter(None, [verdict.headline, verdict.details, *notes])))
