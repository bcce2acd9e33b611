"""`knowgate eval`: gates compared on the same questions."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from knowgate.cli.console import STDERR_CONSOLE, create_wide_console, print_json, print_page_location, print_text
from knowgate.cli.gate_specs import split_gate_specs
from knowgate.cli.label import labeling_progress_bar
from knowgate.cli.options import CandidatesOption, RerankerOption, RunnerOption, parse_path
from knowgate.cli.progress import show_arbitration_progress
from knowgate.data.runs.caveats import list_column_caveats
from knowgate.evaluation.cost import DEFAULT_SEARCH_PRICE, DEFAULT_SEARCH_SECONDS, DEFAULT_TOKEN_PRICE, CostAssumptions
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.evaluation.recommendation import MAX_LOSS
from knowgate.evaluation.report.evaluation_tables import build_evaluation_tables
from knowgate.evaluation.report.evaluation_verdict import EvaluationVerdict, build_verdict
from knowgate.evaluation.report.report_folder import build_summary, check_report_folder, write_report
from knowgate.evaluation.report.terminal import render_terminal_table
from knowgate.gates.artifacts.drift import format_far_warning
from knowgate.integrations.experiment_trackers import check_trackers, log_to_mlflow, log_to_wandb


def eval_(
    labels: Annotated[
        list[Path] | None,
        typer.Option(parser=parse_path, metavar="RUN", help="Label run to evaluate on; may be repeated."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Instead of --labels: questions (data specs, comma-separated) to answer now.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="With --data: model spec (default: smollm). With --labels: the runs' LLM, for gates that ask."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="free|FILE",
            help="Wording of the answers, as in `label`. With --labels and --model: that of the runs.",
        ),
    ] = None,
    index: Annotated[
        str | None, typer.Option(help="With --data: index folder, http:URL or a search engine, as in `ask`.")
    ] = None,
    rerank: RerankerOption = None,
    candidates: CandidatesOption = 20,
    k: Annotated[int | None, typer.Option(min=1, help="With --data: passages shown to the LLM, as in `label`.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --data: only the first so many questions.")] = None,
    gates: Annotated[
        list[str] | None,
        typer.Option(help="Gate specs and folders, separated by commas. [default: auto, all that the rows allow]"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=parse_path, metavar="DIR", help="Folder for report.html, summary.json and table.md."),
    ] = None,
    plug_in: Annotated[bool, typer.Option("--plug-in", help="Allow gates that were fitted on another LLM.")] = False,
    drop_seen: Annotated[
        bool, typer.Option("--drop-seen", help="Leave out questions a gate was fitted on, instead of refusing it.")
    ] = False,
    second_look: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Fitted kbm gate that judges the passages of every row: each gate with and without it."
        ),
    ] = None,
    arbiter: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|rules",
            help="Who chooses after retrieval: each gate with and without it. Asked once, then on record in the runs.",
        ),
    ] = None,
    price_retrieval: Annotated[
        float | None,
        typer.Option(
            help="Price of one search: also skip, one retrieval or several, by expected gain (needs --iterative rows)."
        ),
    ] = None,
    price_wrong: Annotated[
        float, typer.Option(help="Price of a wrong answer, in the currency of --price-retrieval.")
    ] = 1.0,
    record: Annotated[bool, typer.Option("--record", help="Keep what the gates said in the label runs.")] = False,
    resamples: Annotated[int, typer.Option(min=0, help="Bootstrap resamples for the intervals.")] = 2_000,
    seed: Annotated[int, typer.Option(help="Of the resamples.")] = 0,
    max_loss: Annotated[
        float, typer.Option(min=0, max=1, help="For the recommendation: share of the answers that skipping may cost.")
    ] = MAX_LOSS,
    price_search: Annotated[
        float | None,
        typer.Option(min=0, help="For savings: price of one search (--price-retrieval if given, else 0.005)."),
    ] = None,
    price_token: Annotated[
        float, typer.Option(min=0, help="For savings: price of one token that the LLM reads or writes.")
    ] = DEFAULT_TOKEN_PRICE,
    search_seconds: Annotated[
        float, typer.Option(min=0, help="For latency: how long a search takes.")
    ] = DEFAULT_SEARCH_SECONDS,
    runner: RunnerOption = "local",
    html: Annotated[bool, typer.Option("--html/--no-html", help="Write the page.")] = True,
    mlflow: Annotated[
        bool, typer.Option("--mlflow", help="Also a run in MLflow (extra mlflow; MLFLOW_TRACKING_URI).")
    ] = False,
    wandb: Annotated[
        bool, typer.Option("--wandb", help="Also a run in Weights & Biases (extra wandb; WANDB_PROJECT).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the tables.")] = False,
) -> None:
    """Compare gates, and say which to use at which threshold: accuracy, searches, ranking, calibration, cost.

    Example: knowgate eval --labels runs/test --gates logprob:min,flare,my-fusion --out report
    """
    check_trackers(mlflow=mlflow, wandb=wandb)
    if out is not None:
        check_report_folder(out)  # before the work, not after it
    with (
        labeling_progress_bar() if data else nullcontext(lambda tally: None) as show,
        show_arbitration_progress(arbiter) as weighed,
    ):
        evaluation = evaluate(
            split_gate_specs(gates, labels or ()),
            labels or None,
            data=data or None,
            model=model,
            prompts=prompts,
            index=index,
            rerank=rerank,
            candidates=candidates,
            k=k,
            out=out,
            limit=limit,
            plug_in=plug_in,
            drop_seen=drop_seen,
            second_look=second_look,
            arbiter=arbiter,
            price_retrieval=price_retrieval,
            price_wrong=price_wrong,
            record=record,
            resamples=resamples,
            seed=seed,
            runner=runner,
            on_progress=show,
            on_weighed=weighed,
        )
    for words in list_column_caveats(evaluation.trial):
        STDERR_CONSOLE.print(words, style="yellow")
    for gate in evaluation.gates:
        if said := format_far_warning(gate.gate, gate.far, len(evaluation.trial.rows)):
            STDERR_CONSOLE.print(said, style="yellow")
    given = [price for price in (price_search, price_retrieval, DEFAULT_SEARCH_PRICE) if price is not None]
    assumed = CostAssumptions(given[0], price_token, search_seconds)
    if as_json:
        print_json(build_summary(evaluation, max_loss))
    else:
        create_wide_console().print(render_evaluation_tables(evaluation))
        _say_verdict(build_verdict(evaluation, assumed, max_loss))
    if out is not None:
        write_report(evaluation, out, html=html, assumed=assumed, max_loss=max_loss)
        if html:
            print_page_location(out / "report.html")
    if mlflow:
        STDERR_CONSOLE.print(f"MLflow has it as run {log_to_mlflow(evaluation)}.")
    if wandb:
        STDERR_CONSOLE.print(f"Weights & Biases has it as run {log_to_wandb(evaluation)}.")
    if data is not None:
        kept = " ".join(f"--labels {run}" for run in evaluation.trial.runs)
        STDERR_CONSOLE.print(f"Answers and decisions are kept; without the LLM: knowgate eval {kept}")


def render_evaluation_tables(evaluation: Evaluation) -> Group:
    parts: list[RenderableType] = []
    for sheet in build_evaluation_tables(evaluation):
        parts += [Text(sheet.title, style="bold"), render_terminal_table(sheet), Text()]
    return Group(*parts)


def _say_verdict(said: EvaluationVerdict) -> None:
    """Last, where it is still on the screen."""
    words = " ".join([said.label + ":", said.text, *([said.note] if said.note else [])])
    print_text(words)
