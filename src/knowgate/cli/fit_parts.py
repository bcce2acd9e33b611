"""What the commands of `knowgate fit` share: options as typer reads them, progress, estimates in words."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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


@dataclass
class Watching:
    """Shows how far a fit is. said: what its milestones were called ('epoch 0.5'), told as they were reached."""

    show: Show
    said: set[str] = field(default_factory=set)

    def __call__(self, step: FitStep) -> None:
        self.show(step.done, step.total, step.words, stage=step.stage, unit=step.unit)
        if step.is_milestone:
            self.show.say(step.words)
            self.said.add(step.words.partition(",")[0])

    def untold(self, notes: Iterable[str]) -> list[str]:
        """The notes without those on milestones that were seen already."""
        return [note for note in notes if note.partition(":")[0] not in self.said]


def estimate_shown(estimate: Mapping[str, float | None]) -> str:
    if estimate["value"] is None:
        return "not defined"
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def split_shown(split: Mapping[str, int]) -> str:
    """How many questions each part has: '181 train, 40 test'."""
    return ", ".join(f"{n} {part}" for part, n in split.items())
