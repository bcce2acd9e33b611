"""`knowgate fit arbiter`: its options are those all modes share and those each mode's fit function names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from knowgate.arbiters import FITTED_ARBITERS
from knowgate.cli.console import WORDS, plain_console
from knowgate.cli.fit_parts import Watching, estimate_shown, fit_parameter, split_shown
from knowgate.cli.made_by import made_by
from knowgate.cli.options import Seed
from knowgate.cli.paths import path
from knowgate.cli.progress import progress
from knowgate.fitting import FitOption, arbiter_fit, fit_arbiter, options_of

ABOUT = """Fit an arbiter: it chooses, after retrieval, between the answer from memory and the one with passages.

    Example: knowgate fit arbiter --labels RUN --out my-arbiter"""
MODES = "|".join(FITTED_ARBITERS)
SHARED = ("labels", "out", "mode", "seed")


def _shared(
    labels: Annotated[
        list[Path] | None,
        typer.Option("--labels", parser=path, metavar="RUN", help="Label run with both answers; may be repeated."),
    ] = None,
    *,
    out: Annotated[
        Path, typer.Option("--out", parser=path, metavar="DIR", help="Folder of the arbiter; use it as --arbiter DIR.")
    ],
    mode: Annotated[str, typer.Option(metavar=MODES, help="What it goes by; see the options of each.")] = "features",
    seed: Seed = 0,
) -> None:
    """The options of every mode."""


def arbiter_command() -> Callable[..., None]:
    """The function behind `knowgate fit arbiter`, with the options of every mode; None: the mode's own default."""
    own: dict[str, list[FitOption]] = {}
    for mode in FITTED_ARBITERS:
        for name, option in options_of(arbiter_fit(mode)).items():
            own.setdefault(name, []).append(option)

    def command(**given: Any) -> None:
        shared = {key: given.pop(key) for key in SHARED}
        fit_and_tell(shared, {name: value for name, value in given.items() if value is not None})

    shared = inspect.signature(_shared, eval_str=True).parameters.values()
    parameters = [*shared, *(fit_parameter(options[0], "the modes", unset=True) for options in own.values())]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = ABOUT
    return command


def fit_and_tell(shared: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Fit, and say what came out."""
    out, labels, mode = shared.pop("out"), shared.pop("labels") or [], shared.pop("mode")
    with progress("fitting an arbiter", "examples", WORDS) as show:
        watching = Watching(show)
        arbiter = fit_arbiter(labels, out=out, mode=mode, command=made_by(), watch=watching, **shared, **options)
    made = arbiter.artefact.manifest
    for note in watching.untold(made["notes"]):
        WORDS.print(note)
    table = Table("measure", "test split", box=None)
    for measure, one in made["metrics"].items():
        table.add_row(measure.replace("_", " "), estimate_shown(one))
    plain_console(soft_wrap=False).print(table)
    WORDS.print(f"{mode} arbiter fitted: {split_shown(made['split'])}. Use it: knowgate ask --arbiter {out}")
    gain = made["metrics"].get("gain")
    if gain and gain["low"] is not None and gain["low"] <= 0:
        WORDS.print(
            "On the held-out questions it is not shown to gain anything over always giving the answer with passages: "
            "label more questions, or do with --arbiter rules.",
            style="yellow",
        )
