"""What a fit function says about itself in its signature: its options, what it is handed, the examples it wants.

    def fit_mine(
        examples: Annotated[Examples, Wanted(target="known")],
        *,
        layer: Annotated[str, "mid, late, last or a number"] = "mid",
        seed: int = 0,
    ) -> FitResult:

A keyword with a text is an option: of the library's `fit`, and of `knowgate fit NAME`. A keyword without one is no
option; those of HANDED are handed in where the function asks for them, the others keep their defaults.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from knowgate.core.validation import MAX_COUNT, format_value
from knowgate.errors import BadSetting
from knowgate.gates.artifacts.gate_folder import Tensors
from knowgate.stats.metrics import FloatArray
from knowgate.training.examples import Target
from knowgate.types import Signal, SignalRequest

INJECTED_ARGUMENTS = {
    "seed": "of the splits and of training",
    "work": "folder to keep an unfinished training in, so that the same call goes on with it",
    "watch": "function that is told how far the fit is, as a FitStep",
}
NUMBER_TYPES = {int: "a whole number", float: "a number"}
FitFunction = Callable[..., Any]


@dataclass(frozen=True)
class ExampleRequirements:
    """The examples a fit function asks for. target: what it learns unless told otherwise; None for the usual one.

    weighs: it lets rows count by `Examples.weights`, so that label runs of different size can be balanced.
    """

    target: Target | None = None
    reads_states: bool = True  # False: hidden states are not loaded, which saves memory
    weighs: bool = False


@dataclass(frozen=True)
class FitOption:
    """One option. `kind` is its type without None; `allowed` are its values where they can be listed."""

    name: str
    kind: type
    allowed: tuple[Any, ...]
    default: Any
    help: str

    @property
    def may_be_none(self) -> bool:
        return self.default is None

    def check(self, value: Any, gate: str) -> None:
        if value is None and self.may_be_none:
            return
        if self.allowed and value not in self.allowed:
            raise BadSetting(f"fit {gate}: {self.name} is '{value}'; allowed: {', '.join(map(str, self.allowed))}.")
        accepted = (int, float) if self.kind is float else self.kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.kind is not bool):
            needed = NUMBER_TYPES.get(self.kind, "true or false" if self.kind is bool else "text")
            raise BadSetting(f"fit {gate}: {self.name} is {format_value(value)}; it must be {needed}.")
        if self.kind in NUMBER_TYPES and not abs(float(str(value))) <= MAX_COUNT:  # NaN is not, either
            raise BadSetting(f"fit {gate}: {self.name} is {format_value(value)}; it must be a number within reason.")


def read_fit_options(function: FitFunction) -> dict[str, FitOption]:
    """The options of a fit function, in the order it names them."""
    hints = typing.get_type_hints(function, include_extras=True)
    options = {}
    for name, parameter in inspect.signature(function).parameters.items():
        text = _first(hints.get(name), str)
        if parameter.kind is parameter.KEYWORD_ONLY and text is not None:
            options[name] = _option(name, typing.get_args(hints[name])[0], parameter.default, text)
    return options


def check_fit_options(gate: str, function: FitFunction, given: Mapping[str, Any]) -> None:
    """Refuse options the gate does not have and values that are not allowed."""
    known = read_fit_options(function)
    for name, value in given.items():
        if name not in known:
            raise BadSetting(f"fit {gate} has no option '{name}'. Known: {', '.join(known) or 'none'}.")
        known[name].check(value, gate)


def read_requirements(function: FitFunction) -> ExampleRequirements:
    """The examples it wants; the usual ones where it says nothing."""
    hints = typing.get_type_hints(function, include_extras=True)
    first = next(iter(inspect.signature(function).parameters))
    return _first(hints.get(first), ExampleRequirements) or ExampleRequirements()


def select_injected_arguments(function: FitFunction, things: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the things that the function asks for by name."""
    asked = inspect.signature(function).parameters
    lacking = [name for name in _required(function) if name not in things]
    if lacking:
        raise BadSetting(
            f"the fit function {function.__qualname__} asks for '{lacking[0]}', which nobody hands in; "
            f"known: {', '.join(INJECTED_ARGUMENTS)}."
        )
    return {name: value for name, value in things.items() if name in asked}


def _required(function: FitFunction) -> list[str]:
    """Keywords without default."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]


def _first(hint: Any, kind: type) -> Any:
    """The first remark of this kind in an Annotated hint."""
    return next((remark for remark in getattr(hint, "__metadata__", ()) if isinstance(remark, kind)), None)


def _option(name: str, hint: Any, default: Any, text: str) -> FitOption:
    if default is inspect.Parameter.empty:
        raise BadSetting(f"the option '{name}' of a fit function has no default; give it one.")
    if isinstance(hint, types.UnionType):
        hint = next(each for each in typing.get_args(hint) if each is not types.NoneType)
    if typing.get_origin(hint) is Literal:
        values = typing.get_args(hint)
        return FitOption(name, type(values[0]), values, default, text)
    return FitOption(name, hint, (), default, text)


@dataclass(frozen=True)
class FitResult:
    """What a fit gives: the gate's name and options, what it must read, and its weights.

    raw: uncalibrated need of the given row numbers. notes: lines for the card. learnt_all: every row taught it, the
    held-out ones too, which `raw` scores with a part of it that did not see them.
    """

    gate: str
    options: Mapping[str, Any]
    needs: frozenset[Signal]
    want: SignalRequest
    tensors: Tensors
    raw: Callable[[Sequence[int]], FloatArray]
    notes: Sequence[str] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    learnt_all: bool = False


class FitProgress(Protocol):
    """`done` of `total` things called `unit`, in this `stage`; `words` say more, such as the pace.

    is_milestone: worth a line of its own.
    """

    @property
    def done(self) -> int: ...

    @property
    def total(self) -> int: ...

    @property
    def unit(self) -> str: ...

    @property
    def stage(self) -> str: ...

    @property
    def words(self) -> str: ...

    @property
    def is_milestone(self) -> bool: ...


FitProgressCallback = Callable[[FitProgress], None]


@dataclass(frozen=True)
class SimpleFitProgress:
    """A step of a fit that has nothing more to tell."""

    done: int
    total: int
    unit: str = "questions"
    stage: str = "fitting"
    words: str = ""
    is_milestone: bool = False


def ignore_progress(step: FitProgress) -> None:
    """Nobody looks."""
