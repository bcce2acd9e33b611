"""`knowgate fit` without a gate name: choose gate, arbiter and threshold, and write them as one policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from knowgate.cli.console import create_console, inform
from knowgate.cli.options import format_command_line, path_option
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.data.runs.folder import RunFolder, suggest_ask_options
from knowgate.gates.artifacts.gate_folder import CARD_FILE
from knowgate.training.fit_function import FitProgress, FitProgressCallback
from knowgate.training.policy.evidence import PolicyOptions
from knowgate.training.policy.folder import format_result, list_legend, list_shown_results
from knowgate.training.policy.search import FittedPolicy, fit_policy


def fit_policy_command(
    context: typer.Context,
    labels: Annotated[
        list[Path] | None,
        path_option(
            "RUN", "Folder of a label run (made by knowgate label or import-answers); may be repeated.", "--labels"
        ),
    ] = None,
    out: Annotated[
        Path | None, path_option("DIR", "Folder to write the policy to; use it as --gate DIR.", "--out")
    ] = None,
    *,
    options: PolicyOptions,
) -> None:
    """Fit a policy, unless a gate is named: then its own command runs."""
    if context.invoked_subcommand is not None:
        if labels or out:
            flag = "--labels" if labels else "--out"
            raise typer.BadParameter(f"This option must follow the name of a command: knowgate fit COMMAND {flag}.")
        return
    if not labels or out is None:
        raise typer.BadParameter("Fitting a policy needs --labels and --out: knowgate fit --labels RUN --out my-policy")
    with show_progress("fitting a policy", "folds") as show:
        policy = fit_policy(labels, out=out, options=options, watch=_watch(show), command=format_command_line())
    print_policy(policy, str(RunFolder(labels[0]).manifest()["settings"]["model"]))


def _watch(show: ProgressCallback) -> FitProgressCallback:
    """Show progress: steps of the search and failed candidates as lines, everything else on the bar."""

    def watch(progress: FitProgress) -> None:
        if progress.is_milestone and progress.unit in ("steps", "folds"):
            show.say(progress.words)
        else:
            show(progress.done, progress.total, progress.words, stage=progress.stage, unit=progress.unit)

    return watch


def print_policy(policy: FittedPolicy, model: str) -> None:
    """Print what was tried on stdout, and what was chosen and how to use it on stderr."""
    if policy.choice is not None:
        table = Table("policy", "searches", "right", "LLM calls", "against always", box=None)
        for name, result in list_shown_results(policy.choice):
            table.add_row(*format_result(name, result))
        create_console(soft_wrap=False).print(table)
        for line in list_legend(policy.choice):
            inform(line)
    for line in policy.summary:
        inform(line.replace("`price_llm_call`", "--price-llm-call"))
    if policy.choice is None:
        inform(f"Calibrate it: knowgate calibrate {policy.path} --labels RUN --max-loss 0.03 --net")
    inform(f"The card shows everything that was tried: {policy.path / CARD_FILE}")
    inform(f"Use it: knowgate ask --gate {policy.path}{suggest_ask_options(model)}")
