"""What a fit function (a function that trains a gate) looks like: its options, arguments and result.

    def fit_mine(
        examples: Annotated[Examples, ExampleRequirements(target="known")],
        *,
        layer: Annotated[str, "mid, late, last or a number"] = "mid",
        seed: int = 0,
    ) -> FitResult:

A keyword argument that is annotated with a text is an option: a keyword of `fit` and a flag of `knowgate fit NAME`. The
text is its help. A function decorated with `with_options` has the fields of that model as options.

Three arguments are passed to functions that declare them: `seed` (of the splits and of training), `work` (a folder for
checkpoints, so that the same call can continue an interrupted training) and `watch` (a callback that receives progress
as a FitProgress). All other keyword arguments keep their defaults.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, create_model

from knowgate.core.options import Options, option, read_options
from knowgate.errors import BadSetting
from knowgate.gates.artifacts.gate_folder import Tensors
from knowgate.stats.metrics import FloatArray
from knowgate.training.examples import Target
from knowgate.types import Signal, SignalRequest

FitFunction = Callable[..., Any]


@dataclass(frozen=True)
class FitResult:
    """The result of a fit function: a trained gate with uncalibrated scores.

    Attributes:
        gate: Name under which the gate is registered.
        options: Options stored with the gate.
        needs: Signals that the gate needs from the LLM.
        request: The signals that the gate reads for each question.
        tensors: Weights.
        raw: Returns the uncalibrated need for retrieval (0: the LLM knows, 1: retrieve) of the questions with the given
            indices.
        notes: Lines for the model card.
        files: Further files of the gate's folder.
        uses_test_split: Whether test questions were trained on, too (cross-validation). `raw` then scores each of them
            with a member of the ensemble that was not trained on it.
    """

    gate: str
    options: Mapping[str, Any]
    needs: frozenset[Signal]
    request: SignalRequest
    tensors: Tensors
    raw: Callable[[Sequence[int]], FloatArray]
    notes: Sequence[str] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    uses_test_split: bool = False


# --- progress -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitProgress:
    """Progress of a fit.

    Attributes:
        done: Number of units of the stage that are done.
        total: Number of units of the stage.
        unit: What is counted, such as questions or examples.
        stage: What is being done.
        words: Details in words, such as the speed.
        is_milestone: Whether to print this progress on a line of its own, as at the end of an epoch.
    """

    done: int
    total: int
    unit: str = "questions"
    stage: str = "fitting"
    words: str = ""
    is_milestone: bool = False


FitProgressCallback = Callable[[FitProgress], None]


def ignore_progress(progress: FitProgress) -> None:
    """Do nothing: the default progress callback."""


# --- options --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExampleRequirements:
    """The training data that a fit function needs, as annotation of its first argument.

    Attributes:
        target: What the gate predicts, such as 'known' (whether the LLM knows the answer); see `Examples.target`. None to
            choose it from the label runs.
        reads_states: Whether the function needs hidden states. If not, they are not loaded, which saves memory.
        two_heads: Whether the function supports the target 'gain', for which a gate predicts two things: whether the
            answer without passages is right, and whether the answer with passages is right.
    """

    target: Target | None = None
    reads_states: bool = True
    two_heads: bool = False


class KeywordOptions(Options):
    """Base class of option models made from the keywords of a fit function."""

    model_config = ConfigDict(strict=True)


def read_fit_options(function: FitFunction) -> type[Options]:
    """Return a pydantic model of the options of a fit function.

    Options are keyword-only parameters with a help text in their annotation.

    Raises:
        BadSetting: An option has no default value.
    """
    if hasattr(function, "__options__"):
        model: type[Options] = function.__options__
        return model
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        text = _find_annotation(hints.get(name), str)
        if parameter.kind is parameter.KEYWORD_ONLY and text is not None:
            if parameter.default is parameter.empty:
                raise BadSetting(f"the option '{name}' of {function.__qualname__} has no default value. Give it one.")
            value_type = typing.get_args(hints[name])[0]  # of Annotated[value_type, text]
            fields[name] = (value_type, option(parameter.default, text))
    return create_model("FitKeywords", __base__=KeywordOptions, **fields)


def check_fit_options(gate: str, function: FitFunction, values: Mapping[str, Any]) -> None:
    """Raise BadSetting for options that the gate does not have and for values that are not allowed."""
    read_options(read_fit_options(function), values, f"fit {gate}")


def read_requirements(function: FitFunction) -> ExampleRequirements:
    """Return the data requirements from the annotation of a fit function's first argument."""
    hints = typing.get_type_hints(function, include_extras=True)
    first = next(iter(inspect.signature(function).parameters))
    return _find_annotation(hints.get(first), ExampleRequirements) or ExampleRequirements()


def call_fit_function(
    function: FitFunction,
    data: Any,
    options: Mapping[str, Any],
    *,
    seed: int,
    work: Path,
    watch: FitProgressCallback | None,
) -> Any:
    """Train a gate or an arbiter with its fit function.

    `seed`, `work` and `watch` are passed only if the function declares a parameter of this name.
    """
    parameters = inspect.signature(function).parameters
    offered = {"seed": seed, "work": work, "watch": watch or ignore_progress}
    declared = {name: value for name, value in offered.items() if name in parameters}
    return function(data, **declared, **options)


def _find_annotation(hint: Any, kind: type) -> Any:
    """Return the first item of this type in the metadata of an Annotated hint; None if there is none."""
    return next((item for item in getattr(hint, "__metadata__", ()) if isinstance(item, kind)), None)
