"""`knowgate sweep`: vary one setting over recorded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from knowgate.cli.console import STDERR_CONSOLE, create_console, print_tables
from knowgate.cli.gate_specs import split_gate_specs
from knowgate.cli.option_flags import expand_options
from knowgate.cli.options import GatesOption, LabelsOption, LimitOption, PlugInOption, parse_integers, parse_path
from knowgate.core.display import TextTable, render_markdown_tables
from knowgate.core.options import Count, Options, Seed
from knowgate.data.questions import load_questions
from knowgate.data.runs.table import load_label_table
from knowgate.errors import BadSetting, MissingExtra
from knowgate.gates.offline_scoring import drop_seen_rows, score_gates
from knowgate.models import load_model
from knowgate.models.prompts.answers import load_answer_prompts
from knowgate.papers import sweeps
from knowgate.papers.cbdr_tables import build_beta_tables
from knowgate.papers.dhicl_tables import EXAMPLE_COUNTS, LABEL_WORD_PAIRS, DhiclVariants, build_dhicl_tables

app = typer.Typer(help="Vary one setting over recorded rows: thresholds, beta, variants, data sets, LLMs, IK.")
DropSeen = Annotated[
    bool, typer.Option("--drop-seen", help="Leave out questions a gate was fitted on, instead of raising an error.")
]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]


@app.command()
def thresholds(
    labels: LabelsOption,
    gates: GatesOption = None,
    plug_in: PlugInOption = False,
    drop_seen: DropSeen = False,
    markdown: AsMarkdown = False,
) -> None:
    """Every threshold from 0.1 to 0.9, as the IK paper sweeps it.

    Example: knowgate sweep thresholds --labels runs/test --gates my-ik
    """
    table, specs = load_label_table(labels), split_gate_specs(gates, labels)
    table = drop_seen_rows(table, specs) if drop_seen else table
    scores = score_gates(table, specs, plug_in=plug_in)
    _print([sweeps.sweep_thresholds(table, gate) for gate in scores], markdown)


@app.command()
def beta(
    labels: LabelsOption,
    gates: GatesOption = None,
    plug_in: PlugInOption = False,
    drop_seen: DropSeen = False,
    markdown: AsMarkdown = False,
) -> None:
    """Answer directly if confidence is above beta: 0.5 to 0.98, as CBDR sweeps it.

    Confidence is the raw softmax of a fitted gate (fit the probe with --target known --balanced), 1 - need of another.
    Runs of the same questions with different passages (`label --rerank`, `--k`) make a table: accuracy
    (retrieval rate) by beta, reranker and k.

    Example: knowgate sweep beta --labels runs/test --labels runs/test-reranked --gates my-probe
    """
    _print(build_beta_tables(labels, split_gate_specs(gates, labels), plug_in=plug_in, drop_seen=drop_seen), markdown)


@app.command()
def variants(
    labels: LabelsOption,
    gate: Annotated[str, typer.Option(help="How the names of the stored gates begin.")] = "dhicl",
    markdown: AsMarkdown = False,
) -> None:
    """Stored variants of a gate, for example k and label words of DH-ICL (made by `knowgate eval --data`).

    Example: knowgate sweep variants --labels runs/test --gate dhicl
    """
    _print([sweeps.sweep_variants(load_label_table(labels), gate)], markdown)


@app.command()
def transfer(
    train: Annotated[
        list[Path], typer.Option(parser=parse_path, metavar="RUN", help="Label run to fit on; may be repeated.")
    ],
    labels: LabelsOption,
    fit: Annotated[
        str,
        typer.Option(help="What to fit: any gate of `knowgate fit`, or e.g. ik:mode=text,tokens=8."),
    ] = "fusion",
    markdown: AsMarkdown = False,
) -> None:
    """Fitted on one data set, tested on others: a matrix of AUROC.

    Example: knowgate sweep transfer --train runs/nq-train --train runs/squad-train --labels runs/nq-test
    """
    try:
        table = sweeps.sweep_transfer(fit, train, labels, STDERR_CONSOLE.print)
    except ModuleNotFoundError as error:
        raise MissingExtra("fitting", "train") from error
    _print([table], markdown)


@app.command("plug-in")
def plug_in_matrix(labels: LabelsOption, gates: GatesOption = None, markdown: AsMarkdown = False) -> None:
    """Gates fitted on one LLM gating another: a matrix of AUROC; * marks a gate of another LLM.

    Example: knowgate sweep plug-in --gates gate-of-a,gate-of-b --labels runs-of-a --labels runs-of-b
    """
    if not gates:
        raise BadSetting("sweep plug-in compares fitted gates. Name their folders: --gates GATE,GATE")
    _print([sweeps.sweep_plug_in(split_gate_specs(gates, labels), labels)], markdown)


class IkSweepOptions(Options):
    """Options of `knowgate sweep ik`."""

    test: list[Path] = Field(
        default_factory=list,
        description="Label run to test on; may be repeated. Default: the test split of --labels.",
        json_schema_extra={"metavar": "RUN"},
    )
    tokens: str = Field(default="0,8,32,128", description="Numbers of draft tokens T, separated by commas.")
    rows: str = Field(default="all", description="Training sizes, separated by commas; 'all' for as many as there are.")
    grades: str = Field(
        default="",
        description="Graders whose verdicts are learned: exact, contains, judge, separated by commas. Default: the "
        "runs' own.",
    )
    judge: str | None = Field(default=None, description="Model spec of the judge, for --grades judge.")
    mode: str = Field(default="lora", description="lora (fine-tuned judge) or text (head over embeddings).")
    base: str | None = Field(default=None, description="Model to fine-tune. Default: the LLM that was labeled.")
    epochs: Count | None = Field(default=None, description="Passes over the examples. Default: as `fit ik`.")
    out: Path | None = Field(
        default=None,
        description="Folder for the judges; the same command continues where it stopped.",
        json_schema_extra={"metavar": "DIR"},
    )
    seed: Seed = Field(default=0, description="Seed of splits, samples and training.")


@app.command()
@expand_options
def ik(labels: LabelsOption, options: IkSweepOptions, markdown: AsMarkdown = False) -> None:
    """IK's ablations: how many draft tokens, how many training questions, whose labels. Fits a judge for each.

    Example: knowgate sweep ik --labels runs/train --tokens 0,8,32 --rows 1000,5000 --grades contains,judge --judge M
    """
    from knowgate.papers.ik_ablations import IkAblations, sweep_ik  # imports what fitting needs

    sizes = _split(options.rows)
    numbers = parse_integers("--rows", ",".join("0" if size == "all" else size for size in sizes))
    fit_options = {"mode": options.mode, "base": options.base}
    ablations = IkAblations(
        tokens=parse_integers("--tokens", options.tokens),
        rows=[None if size == "all" else number for size, number in zip(sizes, numbers, strict=True)],
        graders=_split(options.grades),
        judge=load_model(options.judge) if options.judge else None,
        fit_options=fit_options if options.epochs is None else fit_options | {"epochs": options.epochs},
        seed=options.seed,
    )
    try:
        table = sweep_ik(labels, ablations, test_runs=options.test, out=options.out, notify=STDERR_CONSOLE.print)
    except ModuleNotFoundError as error:
        raise MissingExtra("fitting", "train") from error
    _print([table], markdown)


class DhiclSweepOptions(Options):
    """Options of `knowgate sweep dhicl`."""

    history: str = Field(default="history.db", description="The log, made by `knowgate history import`.")
    model: str | None = Field(
        default=None, description="Model spec: it decides now, and the run stores it. Default: what is stored."
    )
    gates: list[str] | None = Field(
        default=None, description="Other gates in the first table: folders and specs, separated by commas."
    )
    k: Count = Field(default=20, description="Examples, if their number does not vary.")
    counts: str = Field(default=",".join(map(str, EXAMPLE_COUNTS)), description="Numbers of examples.")
    words: str = Field(default=",".join(LABEL_WORD_PAIRS), description="Label words, known/unknown.")
    embedder: str | None = Field(default=None, description="Embedding of the log, if not its own.")


@app.command()
@expand_options
def dhicl(labels: LabelsOption, options: DhiclSweepOptions, markdown: AsMarkdown = False) -> None:
    """DH-ICL's tables on label runs: accuracy (retrieval rate), compared with never, always and matched random.

    Other gates, ablations (calibration, time-sensitive rows, no history), cold start, number of examples, label words.

    Example: knowgate sweep dhicl --labels runs/trivia --labels runs/web --history log.db --model smollm --gates my-uar
    """
    counts = parse_integers("--counts", options.counts)
    variants = DhiclVariants(options.history, options.k, counts, _split(options.words), options.embedder)
    tables = build_dhicl_tables(
        labels,
        variants,
        model=load_model(options.model) if options.model else None,
        other_gates=split_gate_specs(options.gates, labels) if options.gates else [],
        notify=STDERR_CONSOLE.print,
    )
    _print(tables, markdown)


@app.command()
def latency(
    data: Annotated[str, typer.Option(help="Questions: jsonl:FILE, bench:NAME/SPLIT or hub:NAME?split=...")],
    gates: GatesOption = None,
    model: Annotated[str, typer.Option(help="Model spec.")] = "smollm",
    limit: LimitOption = 50,
    plug_in: PlugInOption = False,
    markdown: AsMarkdown = False,
) -> None:
    """How long gates take to decide on one question at a time: median and 95th percentile.

    Example: knowgate sweep latency --data bench:triviaqa/test --gates dhicl:log.db,my-uar,logprob:mean
    """
    if not gates:
        raise BadSetting("sweep latency needs gates to time: --gates dhicl:log.db,my-uar,logprob:mean")
    questions, llm = load_questions(data, limit), load_model(model)
    latencies = sweeps.time_gates(split_gate_specs(gates), questions, llm, load_answer_prompts(), plug_in=plug_in)
    _print([sweeps.build_latency_table(latencies)], markdown)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _print(tables: list[TextTable], markdown: bool) -> None:
    if markdown:
        create_console().print(render_markdown_tables(tables))
    else:
        print_tables(tables)
