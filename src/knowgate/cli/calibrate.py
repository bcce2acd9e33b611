"""`knowgate calibrate`: choose a gate's threshold, with evidence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from knowgate.cli.paths import path
from knowgate.errors import BadSetting
from knowgate.gates import ALWAYS, is_artefact
from knowgate.statistics import wilson
from knowgate.thresholds import Calibration, Target, ThresholdResult, calibrate, sentence, store

WORDS = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)


def calibrate_command(
    gate: Annotated[str, typer.Argument(help="Folder of a fitted gate, or a plain gate such as logprob:mean.")],
    labels: Annotated[
        list[Path],
        typer.Option(parser=path, metavar="RUN", help="Label run with open-book answers; may be repeated."),
    ],
    max_loss: Annotated[
        float | None, typer.Option(help="Guarantee: accuracy lost against always retrieving, e.g. 0.02.")
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(show_default="0.95", help="Of the guarantee; with --max-loss.")
    ] = None,
    retrieval_rate: Annotated[
        float | None, typer.Option(help="Budget: share of questions to retrieve for, e.g. 0.5; never above it.")
    ] = None,
    best_accuracy: Annotated[
        bool, typer.Option("--best-accuracy", help="Most right answers; of several thresholds the one that skips most.")
    ] = False,
    held_out: Annotated[
        float, typer.Option(min=0, max=0.95, help="Share of the questions kept back to try the threshold on.")
    ] = 0.5,
    out: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="DIR", help="Leave GATE as it is and write a copy with the threshold."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the split in two.")] = 0,
) -> None:
    """Choose a gate's threshold: by guarantee, by budget or by accuracy.

    Questions the gate was fitted on are left out; no LLM is run.

    Example: knowgate calibrate my-gate --labels run --max-loss 0.02 --confidence 0.95
    """
    target = _target(max_loss, confidence, retrieval_rate, best_accuracy)
    if out is not None and not is_artefact(gate):
        raise BadSetting(f"'{gate}' is not a fitted gate, so there is nothing to write to --out; leave it away.")
    found = calibrate(gate, labels, target, share=held_out, seed=seed)
    Console(highlight=False).print(_table(found))
    WORDS.print(sentence(found.threshold, found.kind, found.evidence))
    if found.left_out:
        WORDS.print("Left out: " + ", ".join(f"{count} {reason}" for reason, count in found.left_out.items()) + ".")
    if is_artefact(gate):
        place = store(found, gate, out)
        WORDS.print(f"Written to {place}. Use it: knowgate ask --gate {place}")
    else:
        WORDS.print(_how_to_pass(gate, found.threshold))


def _how_to_pass(gate: str, threshold: float) -> str:
    if threshold == ALWAYS:
        return "Use it: knowgate ask --gate always"
    return f"A plain gate keeps no threshold; pass it: knowgate ask --gate {gate} --threshold {threshold:g}"


def _target(loss: float | None, confidence: float | None, rate: float | None, best: bool) -> Target:
    given = (loss is not None) + (rate is not None) + best
    if given != 1:
        raise BadSetting(
            f"say what the threshold is for: exactly one of --max-loss 0.02, --retrieval-rate 0.5, --best-accuracy "
            f"({given} were given)."
        )
    if loss is not None:
        return Target("guarantee", loss, round(1 - (0.95 if confidence is None else confidence), 12))
    if confidence is not None:
        raise BadSetting("--confidence belongs to --max-loss; the other targets give no guarantee.")
    return Target("accuracy") if rate is None else Target("budget", rate)


def _table(found: Calibration) -> Table:
    """Shares with their 95 % intervals (Wilson)."""
    threshold = "always retrieve" if found.threshold == ALWAYS else f"{found.threshold:g}"
    table = Table("", "chosen on", *(["held out"] if found.held else []), box=None)
    columns = [found.chosen, *([found.held] if found.held else [])]
    table.add_row("threshold", *([threshold] * len(columns)))
    for title, cell in CELLS.items():
        table.add_row(title, *(cell(one) for one in columns))
    return table


def _share(hits: int, n: int) -> str:
    low, high = wilson(hits, n)
    return f"{hits / n:.1%} [{low:.1%}, {high:.1%}]"


CELLS: dict[str, Callable[[ThresholdResult], str]] = {
    "questions": lambda one: str(one.n),
    "retrieval rate": lambda one: _share(one.retrieved, one.n),
    "accuracy": lambda one: _share(one.right, one.n),
    "accuracy, always": lambda one: _share(one.right_always, one.n),
    "accuracy, never": lambda one: _share(one.right_never, one.n),
    "lost against always": lambda one: f"{one.loss:+.1%}",
    "harmed skips": lambda one: f"{one.harmed}: {_share(one.harmed, one.n)}",
}
