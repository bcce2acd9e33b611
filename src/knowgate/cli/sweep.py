"""`knowgate sweep`: one setting varied over recorded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import WORDS
from knowgate.cli.gate_specs import split_specs
from knowgate.cli.numbers import whole_numbers
from knowgate.cli.options import Gates, Labels, PlugIn, Seed
from knowgate.cli.paths import path
from knowgate.cli.sweep_dhicl import dhicl, latency, show
from knowgate.errors import BadSetting, MissingExtra
from knowgate.evaluation import beta_sheets, sweep_plug_in, sweep_thresholds, sweep_transfer, sweep_variants
from knowgate.gates import score_gates, without_seen
from knowgate.runs import Trial, load_trial

app = typer.Typer(help="Vary one setting over recorded rows: thresholds, beta, variants, data sets, LLMs, IK.")
app.command()(dhicl)
app.command()(latency)
DropSeen = Annotated[
    bool, typer.Option("--drop-seen", help="Leave out questions a gate was fitted on, instead of refusing it.")
]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]


@app.command()
def thresholds(
    labels: Labels,
    gates: Gates = None,
    plug_in: PlugIn = False,
    drop_seen: DropSeen = False,
    markdown: AsMarkdown = False,
) -> None:
    """Every threshold from 0.1 to 0.9, as the IK paper sweeps it.

    Example: knowgate sweep thresholds --labels runs/test --gates my-ik
    """
    trial = _trial(labels, gates, drop_seen=drop_seen)
    scored = score_gates(trial, split_specs(gates, labels), plug_in=plug_in)
    show([sweep_thresholds(trial, gate) for gate in scored], markdown)


@app.command()
def beta(
    labels: Labels,
    gates: Gates = None,
    plug_in: PlugIn = False,
    drop_seen: DropSeen = False,
    markdown: AsMarkdown = False,
) -> None:
    """Answer directly where confidence is above beta: 0.5 to 0.98, as CBDR sweeps it.

    Confidence is the raw softmax of a fitted gate (fit the probe with --target known --balanced), 1 - need of another.
    Runs of the same questions whose passages were chosen differently (`label --rerank`, `--k`) make a table: accuracy
    (retrieval rate) by beta, reranker and k.

    Example: knowgate sweep beta --labels runs/test --labels runs/test-reranked --gates my-probe
    """
    show(beta_sheets(labels, split_specs(gates, labels), plug_in=plug_in, drop_seen=drop_seen), markdown)


@app.command()
def variants(
    labels: Labels,
    gate: Annotated[str, typer.Option(help="How the names of the recorded gates begin.")] = "dhicl",
    markdown: AsMarkdown = False,
) -> None:
    """Variants of a gate that are on record: k and label words of DH-ICL, say (made by `knowgate eval --data`).

    Example: knowgate sweep variants --labels runs/test --gate dhicl
    """
    show([sweep_variants(load_trial(labels), gate)], markdown)


@app.command()
def transfer(
    train: Annotated[list[Path], typer.Option(parser=path, metavar="RUN", help="Label run to fit on; repeat it.")],
    labels: Labels,
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
        found = sweep_transfer(fit, train, labels, WORDS.print)
    except ModuleNotFoundError as error:
        raise MissingExtra("fitting", "train") from error
    show([found], markdown)


@app.command()
def ik(
    labels: Labels,
    test: Annotated[
        list[Path] | None,
        typer.Option(parser=path, metavar="RUN", help="Label run to test on. Default: the test split of --labels."),
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
            parser=path, metavar="DIR", help="Keep the judges here; the same command goes on where it stopped."
        ),
    ] = None,
    seed: Seed = 0,
    markdown: AsMarkdown = False,
) -> None:
    """IK's ablations: how many tokens of the draft, how many training questions, whose labels. Fits a judge for each.

    Example: knowgate sweep ik --labels runs/train --tokens 0,8,32 --rows 1000,5000 --grades contains,judge --judge M
    """
    from knowgate.evaluation import sweep_ik
    from knowgate.models import load_model

    given = {"mode": mode, "base": base, **({} if epochs is None else {"epochs": epochs})}
    try:
        sheet = sweep_ik(
            labels,
            test=test or (),
            tokens=whole_numbers("--tokens", tokens),
            rows=[None if word == "all" else number for word, number in _sizes(rows)],
            grades=_words(grades or ""),
            judge=load_model(judge) if judge else None,
            out=out,
            seed=seed,
            say=WORDS.print,
            **given,
        )
    except ModuleNotFoundError as error:
        raise MissingExtra("fitting", "train") from error
    show([sheet], markdown)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _sizes(text: str) -> list[tuple[str, int]]:
    words = _words(text)
    numbers = whole_numbers("--rows", ",".join("0" if word == "all" else word for word in words))
    return list(zip(words, numbers, strict=True))


@app.command("plug-in")
def plug_in_matrix(labels: Labels, gates: Gates = None, markdown: AsMarkdown = False) -> None:
    """Gates fitted on one LLM gating another: a matrix of AUROC; * marks a gate of another LLM.

    Example: knowgate sweep plug-in --gates gate-of-a,gate-of-b --labels runs-of-a --labels runs-of-b
    """
    if not gates:
        raise BadSetting("sweep plug-in compares fitted gates: name their folders, --gates GATE,GATE")
    show([sweep_plug_in(split_specs(gates, labels), labels)], markdown)


def _trial(labels: list[Path], gates: list[str] | None, *, drop_seen: bool) -> Trial:
    trial = load_trial(labels)
    return without_seen(trial, split_specs(gates, labels)) if drop_seen else trial
