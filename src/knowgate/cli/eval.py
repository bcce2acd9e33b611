"""`knowgate eval`: gates compared on the same questions."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from knowgate.cli.console import WORDS, print_json, say_page
from knowgate.cli.gate_specs import split_specs
from knowgate.cli.label import labelling_bar
from knowgate.cli.options import Candidates, Rerank, RunnerSpec
from knowgate.cli.paths import path
from knowgate.cli.tables import print_text, wide_console
from knowgate.cli.weighing import weighing_bar
from knowgate.evaluation import MAX_LOSS, PRICE_SEARCH, PRICE_TOKEN, SEARCH_SECONDS, Assumed, Evaluation, evaluate
from knowgate.gates import far_words
from knowgate.integrations import check_trackers, log_mlflow, log_wandb
from knowgate.report import Verdict, all_sheets, check_report_folder, render, summary_json, verdict, write_report
from knowgate.runs import cautions_of


def eval_(
    labels: Annotated[
        list[Path] | None,
        typer.Option(parser=path, metavar="RUN", help="Label run to evaluate on; may be repeated."),
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
            parser=path,
            metavar="free|FILE",
            help="Wording of the answers, as in `label`. With --labels and --model: that of the runs.",
        ),
    ] = None,
    index: Annotated[
        str | None, typer.Option(help="With --data: index folder, http:URL or a search engine, as in `ask`.")
    ] = None,
    rerank: Rerank = None,
    candidates: Candidates = 20,
    k: Annotated[int | None, typer.Option(min=1, help="With --data: passages shown to the LLM, as in `label`.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --data: only the first so many questions.")] = None,
    gates: Annotated[
        list[str] | None,
        typer.Option(help="Gate specs and folders, separated by commas. [default: auto, all that the rows allow]"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="DIR", help="Folder for report.html, summary.json and table.md."),
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
    ] = PRICE_TOKEN,
    search_seconds: Annotated[
        float, typer.Option(min=0, help="For latency: how long a search takes.")
    ] = SEARCH_SECONDS,
    runner: RunnerSpec = "local",
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
    with labelling_bar() if data else nullcontext(lambda tally: None) as show, weighing_bar(arbiter) as weighed:
        evaluation = evaluate(
            split_specs(gates, labels or ()),
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
    for words in cautions_of(evaluation.trial):
        WORDS.print(words, style="yellow")
    for gate in evaluation.gates:
        if said := far_words(gate.gate, gate.far, len(evaluation.trial.rows)):
            WORDS.print(said, style="yellow")
    given = [price for price in (price_search, price_retrieval, PRICE_SEARCH) if price is not None]
    assumed = Assumed(given[0], price_token, search_seconds)
    if as_json:
        print_json(summary_json(evaluation, max_loss))
    else:
        wide_console().print(tables(evaluation))
        _say_verdict(verdict(evaluation, assumed, max_loss))
    if out is not None:
        write_report(evaluation, out, html=html, assumed=assumed, max_loss=max_loss)
        if html:
            say_page(out / "report.html")
    if mlflow:
        WORDS.print(f"MLflow has it as run {log_mlflow(evaluation)}.")
    if wandb:
        WORDS.print(f"Weights & Biases has it as run {log_wandb(evaluation)}.")
    if data is not None:
        kept = " ".join(f"--labels {run}" for run in evaluation.trial.runs)
        WORDS.print(f"Answers and decisions are kept; without the LLM: knowgate eval {kept}")


def tables(evaluation: Evaluation) -> Group:
    parts: list[RenderableType] = []
    for sheet in all_sheets(evaluation):
        parts += [Text(sheet.title, style="bold"), render(sheet), Text()]
    return Group(*parts)


def _say_verdict(said: Verdict) -> None:
    """Last, where it is still on the screen."""
    words = " ".join([said.label + ":", said.text, *([said.note] if said.note else [])])
    print_text(words)
