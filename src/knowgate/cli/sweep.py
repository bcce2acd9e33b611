"""`knowgate sweep`: one setting varied over recorded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE, create_console, print_tables
from knowgate.cli.gate_specs import split_gate_specs
from knowgate.cli.options import (
    GatesOption,
    LabelsOption,
    LimitOption,
    PlugInOption,
    SeedOption,
    parse_integers,
    parse_path,
)
from knowgate.core.display import TextTable, render_markdown_tables
from knowgate.data.questions import load_questions
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.errors import BadSetting, MissingExtra
from knowgate.gates.offline_scoring import drop_seen_rows, score_gates
from knowgate.models import load_model
from knowgate.models.prompts.answers import load_answer_prompts
from knowgate.papers.cbdr_tables import build_beta_tables
from knowgate.papers.dhicl_tables import EXAMPLE_COUNTS, LABEL_WORD_PAIRS, DhiclVariants, build_dhicl_tables
from knowgate.papers.sweeps import (
    build_latency_table,
    sweep_plug_in,
    sweep_thresholds,
    sweep_transfer,
    sweep_variants,
    time_gates,
)

AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]


def dhicl(
    labels: LabelsOption,
    history: Annotated[str, typer.Option(help="The log, made by `knowgate history import`.")] = "history.db",
    model: Annotated[
        str | None, typer.Option(help="Model spec: it decides now, and the run keeps it. Default: what is on record.")
    ] = None,
    gates: Annotated[
        list[str] | None, typer.Option(help="Gates beside it in the first table: folders and specs, between commas.")
    ] = None,
    k: Annotated[int, typer.Option(min=1, help="Examples, where their number does not vary.")] = 20,
    counts: Annotated[str, typer.Option(help="Numbers of examples.")] = ",".join(map(str, EXAMPLE_COUNTS)),
    words: Annotated[str, typer.Option(help="Label words, known/unknown.")] = ",".join(LABEL_WORD_PAIRS),
    embedder: Annotated[str | None, typer.Option(help="Embedding of the log, if not its own.")] = None,
    markdown: AsMarkdown = False,
) -> None:
    """DH-ICL's tables on label runs: accuracy (retrieval rate) beside never, always and matched random.

    Other gates, ablations (calibration, time-sensitive rows, no history), cold start, number of examples, label words.

    Example: knowgate sweep dhicl --labels runs/trivia --labels runs/web --history log.db --model smollm --gates my-uar
    """
    variants = DhiclVariants(history, k, _numbers(counts), _parts(words), embedder)
    llm = load_model(model) if model else None
    others = split_gate_specs(gates, labels) if gates else []
    print_sweep_tables(
        build_dhicl_tables(labels, variants, model=llm, others=others, say=STDERR_CONSOLE.print), markdown
    )


def latency(
    data: Annotated[str, typer.Option(help="Questions: jsonl:FILE, bench:NAME/SPLIT or hub:NAME?split=...")],
    gates: GatesOption = None,
    model: Annotated[str, typer.Option(help="Model spec.")] = "smollm",
    limit: LimitOption = 50,
    plug_in: PlugInOption = False,
    markdown: AsMarkdown = False,
) -> None:
    """How long gates take to decide on one question at a time: median and 95th percentile, side by side.

    Example: knowgate sweep latency --data bench:triviaqa/test --gates dhicl:log.db,my-uar,logprob:mean
    """
    if not gates:
        raise BadSetting("name the gates to be timed: --gates dhicl:log.db,my-uar,logprob:mean")
    questions, llm = load_questions(data, limit), load_model(model)
    found = time_gates(split_gate_specs(gates), questions, llm, load_answer_prompts(), plug_in=plug_in)
    print_sweep_tables([build_latency_table(found)], markdown)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in _parts(text)]
    except ValueError:
        raise BadSetting(f"--counts is '{text}'; give numbers between commas, such as 5,10,20.") from None


def print_sweep_tables(sheets: list[TextTable], markdown: bool) -> None:
    if markdown:
        create_console().print(render_markdown_tables(sheets))
        return
    print_tables(sheets)


app = typer.Typer(help="Vary one setting over recorded rows: thresholds, beta, variants, data sets, LLMs, IK.")
app.command()(dhicl)
app.command()(latency)
DropSeen = Annotated[
    bool, typer.Option("--drop-seen", help="Leave out questions a gate was fitted on, instead of refusing it.")
]


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
    trial = _trial(labels, gates, drop_seen=drop_seen)
    scored = score_gates(trial, split_gate_specs(gates, labels), plug_in=plug_in)
    print_sweep_tables([sweep_thresholds(trial, gate) for gate in scored], markdown)


@app.command()
def beta(
    labels: LabelsOption,
    gates: GatesOption = None,
    plug_in: PlugInOption = False,
    drop_seen: DropSeen = False,
    markdown: AsMarkdown = False,
) -> None:
    """Answer directly where confidence is above beta: 0.5 to 0.98, as CBDR sweeps it.

    Confidence is the raw softmax of a fitted gate (fit the probe with --target known --balanced), 1 - need of another.
    Runs of the same questions whose passages were chosen differently (`label --rerank`, `--k`) make a table: accuracy
    (retrieval rate) by beta, reranker and k.

    Example: knowgate sweep beta --labels runs/test --labels runs/test-reranked --gates my-probe
    """
    print_sweep_tables(
        build_beta_tables(labels, split_gate_specs(gates, labels), plug_in=plug_in, drop_seen=drop_seen), markdown
    )


@app.command()
def variants(
    labels: LabelsOption,
    gate: Annotated[str, typer.Option(help="How the names of the recorded gates begin.")] = "dhicl",
    markdown: AsMarkdown = False,
) -> None:
    """Variants of a gate that are on record: k and label words of DH-ICL, say (made by `knowgate eval --data`).

    Example: knowgate sweep variants --labels runs/test --gate dhicl
    """
    print_sweep_tables([sweep_variants(load_label_table(labels), gate)], markdown)


@app.command()
def transfer(
    train: Annotated[
        list[Path], typer.Option(parser=parse_path, metavar="RUN", help="Label run to fit on; repeat it.")
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
        found = sweep_transfer(fit, train, labels, STDERR_CONSOLE.print)
    except ModuleNotFoundError as error:
        raise MissingExtra("fitting", "train") from error
    print_sweep_tables([found], markdown)


@app.command()
def ik(
    labels: LabelsOption,
    test: Annotated[
        list[Path] | None,
        typer.Option(
            parser=parse_path, metavar="RUN", help="Label run to test on. Default: the test split of --labels."
        ),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Draft tokens T, between commas.")] = "0,8,32,128",
    rows: Annotated[str, typer.Option(help="Training sizes, between commas; all: as many as there are.")] = "all",
    grades: Annotated[
        str | None,
        typer.Option(help="Whose verdicts are learnt: exact, contains, judge, between commas. Default: the runs' own."),
    ] = None,
    judge: Annotated[str | None, typer.Option(help="Model spec of the judge, for --grades judge.")] = None,
    mode: Annotated[str, typer.Option(help="lora (fine-tuned judge) or text (head over embeddings).")] = "lora",
    base: Annotated[str | None, typer.Option(help="Model to fine-tune. Default: the LLM that was labelled.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Walks over the examples. Default: as `fit ik`.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path, metavar="DIR", help="Keep the judges here; the same command goes on where it stopped."
        ),
    ] = None,
    seed: SeedOption = 0,
    markdown: AsMarkdown = False,
) -> None:
    """IK's ablations: how many tokens of the draft, how many training questions, whose labels. Fits a judge for each.

    Example: knowgate sweep ik --labels runs/train --tokens 0,8,32 --rows 1000,5000 --grades contains,judge --judge M
    """
    from knowgate.models import load_model
    from knowgate.papers.ik_ablations import sweep_ik

    given = {"mode": mode, "base": base, **({} if epochs is None else {"epochs": epochs})}
    try:
        sheet = sweep_ik(
            labels,
            test=test or (),
            tokens=parse_integers("--tokens", tokens),
            rows=[None if word == "all" else number for word, number in _sizes(rows)],
            grades=_words(grades or ""),
            judge=load_model(judge) if judge else None,
            out=out,
            seed=seed,
            say=STDERR_CONSOLE.print,
            **given,
        )
    except ModuleNotFoundError as error:
        raise MissingExtra("fitting", "train") from error
    print_sweep_tables([sheet], markdown)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _sizes(text: str) -> list[tuple[str, int]]:
    words = _words(text)
    numbers = parse_integers("--rows", ",".join("0" if word == "all" else word for word in words))
    return list(zip(words, numbers, strict=True))


@app.command("plug-in")
def plug_in_matrix(labels: LabelsOption, gates: GatesOption = None, markdown: AsMarkdown = False) -> None:
    """Gates fitted on one LLM gating another: a matrix of AUROC; * marks a gate of another LLM.

    Example: knowgate sweep plug-in --gates gate-of-a,gate-of-b --labels runs-of-a --labels runs-of-b
    """
    if not gates:
        raise BadSetting("sweep plug-in compares fitted gates: name their folders, --gates GATE,GATE")
    print_sweep_tables([sweep_plug_in(split_gate_specs(gates, labels), labels)], markdown)


def _trial(labels: list[Path], gates: list[str] | None, *, drop_seen: bool) -> LabelTable:
    trial = load_label_table(labels)
    return drop_seen_rows(trial, split_gate_specs(gates, labels)) if drop_seen else trial
