"""What the commands of `knowgate fit` share: options as typer reads them, progress, estimates in words."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from knowgate.cli.progress import Show
from knowgate.fitting import FitOption, FitStep


def fit_parameter(option: FitOption, gate: str, *, unset: bool = False) -> inspect.Parameter:
    """An option of a fit function as typer reads it. Which values are allowed is checked by the library.

    unset: nothing is handed on where it is not given, so that the fit function's own default holds.
    """
    values = [str(value) for value in option.allowed]
    shown = typer.Option(
        help=option.help,
        metavar="|".join(values) or None,
        rich_help_panel=f"Options of {gate}",
        show_default=str(option.default) if unset and option.default is not None else True,
        autocompletion=(lambda incomplete: [value for value in values if value.startswith(incomplete)])
        if values
        else None,
    )
    kind: Any = option.kind | None if option.may_be_none or unset else option.kind
    keyword, default = inspect.Parameter.KEYWORD_ONLY, None if unset else option.default
    return inspect.Parameter(option.name, keyword, default=default, annotation=Annotated[kind, shown])


def watching(show: Show) -> Callable[[FitStep], None]:
    def watch(step: FitStep) -> None:
        show(step.done, step.total, step.words, stage=step.stage, unit=step.unit)
        if step.is_milestone:
            show.say(step.words)

    return watch


def estimate_shown(estimate: Mapping[str, float | None]) -> str:
    if estimate["value"] is None:
        return "not defined"
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def split_shown(split: Mapping[str, int]) -> str:
    """How many questions each part has: '181 train, 40 test'."""
    return ", ".join(f"{n} {part}" for part, n in split.items())
