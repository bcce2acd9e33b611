"""`knowgate sweep`: one setting varied over recorded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import WORDS
from knowgate.cli.eval import split_specs
from knowgate.cli.options import Gates, Labels, PlugIn
from knowgate.cli.paths import path
from knowgate.cli.sweep_dhicl import dhicl, latency, show
from knowgate.errors import BadSetting, MissingExtra
from knowgate.evaluation import sweep_betas, sweep_plug_in, sweep_thresholds, sweep_transfer, sweep_variants
from knowgate.gates import score_gates
from knowgate.runs import load_trial

app = typer.Typer(help="Vary one setting over recorded rows: thresholds, beta, variants, data sets, LLMs.")
app.command()(dhicl)
app.command()(latency)
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]


@app.command()
def thresholds(labels: Labels, gates: Gates = None, plug_in: PlugIn = False, markdown: AsMarkdown = False) -> None:
    """Every threshold from 0.1 to 0.9, as the IK paper sweeps it.

    Example: knowgate sweep thresholds --labels runs/test --gates my-ik
    """
    trial = load_trial(labels)
    scored = score_gates(trial, split_specs(gates), plug_in=plug_in)
    show([sweep_thresholds(trial, gate) for gate in scored], markdown)


@app.command()
def beta(labels: Labels, gates: Gates = None, plug_in: PlugIn = False, markdown: AsMarkdown = False) -> None:
    """Answer directly where confidence = 1 - need is above beta: 0.5 to 0.98, as CBDR sweeps it.

    Example: knowgate sweep beta --labels runs/test --gates my-probe
    """
    trial = load_trial(labels)
    scored = score_gates(trial, split_specs(gates), plug_in=plug_in)
    show([sweep_betas(trial, gate) for gate in scored], markdown)


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
    fit: Annotated[str, typer.Option(help="What to fit: fusion or probe.")] = "fusion",
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


@app.command("plug-in")
def plug_in_matrix(labels: Labels, gates: Gates = None, markdown: AsMarkdown = False) -> None:
    """Gates fitted on one LLM gating another: a matrix of AUROC; * marks a gate of another LLM.

    Example: knowgate sweep plug-in --gates gate-of-a,gate-of-b --labels runs-of-a --labels runs-of-b
    """
    if not gates:
        raise BadSetting("sweep plug-in compares fitted gates: name their folders, --gates GATE,GATE")
    show([sweep_plug_in(split_specs(gates), labels)], markdown)
