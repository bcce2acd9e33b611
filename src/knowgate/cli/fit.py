"""`knowgate fit`: train a gate from label runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from knowgate.errors import BadSetting, MissingExtra, UnknownName
from knowgate.gates import FITTED

WORDS = Console(stderr=True, soft_wrap=True, highlight=False)


def fit(
    name: Annotated[str, typer.Argument(help="Which gate: probe or fusion.")],
    labels: Annotated[list[Path], typer.Option(help="Label run; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Folder of the fitted gate; use it as --gate FOLDER.")],
    target: Annotated[
        str | None, typer.Option(help="known or benefit. Default: benefit where open-book answers exist.")
    ] = None,
    layer: Annotated[str, typer.Option(help="probe: mid, late, last or a number.")] = "mid",
    position: Annotated[str, typer.Option(help="probe: pre (before the answer) or post (after the draft).")] = "pre",
    kind: Annotated[str, typer.Option(help="probe: mlp (the paper's network) or linear.")] = "mlp",
    cheap: Annotated[bool, typer.Option(help="fusion: without samples and extra passes.")] = False,
    seed: Annotated[int, typer.Option(help="Of the splits.")] = 0,
) -> None:
    """Fit a gate to your LLM: splits, training, calibration, measures on held-out questions, a card."""
    _check(target, position, kind)
    if name not in FITTED:
        raise UnknownName("fitted gate", name, FITTED)
    try:
        from knowgate.fit.data import load_examples
        from knowgate.fit.fusion import fit_fusion
        from knowgate.fit.probe import fit_probe
        from knowgate.fit.save import save_fitted
    except ModuleNotFoundError as error:
        raise MissingExtra("fitting", "train") from error
    examples = load_examples(labels, target=target, seed=seed)  # type: ignore[arg-type]
    options: dict[str, Any] = {"layer": layer, "position": position, "kind": kind}
    fitted = fit_probe(examples, **options) if name == "probe" else fit_fusion(examples, cheap=cheap)
    report = save_fitted(fitted, examples, out, command=shlex.join(["knowgate", *sys.argv[1:]]))
    for note in fitted.notes:
        WORDS.print(note)
    table = Table("measure", "test split", box=None)
    for measure, found in report.metrics.items():
        table.add_row(measure, found.shown())
    Console().print(table)
    WORDS.print(f"{name} fitted on '{examples.target}', {examples.split.sizes()}. Use it: knowgate ask --gate {out}")


def _check(target: str | None, position: str, kind: str) -> None:
    for option, value, allowed in (
        ("target", target, (None, "known", "benefit")),
        ("position", position, ("pre", "post")),
        ("kind", kind, ("mlp", "linear")),
    ):
        if value not in allowed:
            raise BadSetting(f"--{option} is '{value}'; allowed: {', '.join(str(a) for a in allowed if a)}.")
