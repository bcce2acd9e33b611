"""The verb `fit`: a gate's name and label runs in, the fitted gate out.

Knows no gate: their fit functions come from the table of gates, or from entry points of other packages, where the group
'knowgate.fitted_gates' names the gate's class and 'knowgate.fits' its fit function, both under the gate's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from knowgate.core.files import check_replaceable
from knowgate.core.registry import find_plugins, load_plugin, load_target
from knowgate.core.validation import check_seed
from knowgate.data.runs.folder import RunsLike, resolve_run_paths
from knowgate.errors import BadSetting, MissingExtra, UnknownName
from knowgate.gates import FITTED_GATES, load_fitted_gate
from knowgate.gates.artifacts.gate_folder import GATE_KIND, GATE_MANIFEST
from knowgate.gates.fitted_gate import FittedGate
from knowgate.training.examples import Examples, Target, load_examples
from knowgate.training.fit_function import (
    FitFunction,
    FitProgressCallback,
    FitResult,
    check_fit_options,
    ignore_progress,
    read_requirements,
    select_injected_arguments,
)
from knowgate.training.judges.checkpoint import checkpoint_folder, delete_checkpoint

FIT_ENTRY_POINTS = "knowgate.fits"  # entry points of other packages
EXTRA = "train"


def fit(
    name: str,
    runs: RunsLike,
    *,
    out: str | Path,
    target: Target | None = None,
    threshold: float | None = None,
    max_loss: float | None = None,
    balance_sets: bool = False,
    keep_questions: bool = True,
    seed: int = 0,
    watch: FitProgressCallback | None = None,
    command: str = "",
    **options: Any,
) -> FittedGate:
    """Fit a gate on label runs, measure it on questions held out, write its folder, and load it from there.

    target: known, benefit or agree (no gold needed: closed- and open-book answer are the same); None for what suits the
    gate and the runs. threshold: None for 0.5 or, where need means that retrieval helps, for what retrieves least and
    loses at most max_loss (0.01) against always retrieving on questions it was not trained on. balance_sets: label runs
    of different size count the same, in losses and calibration; measures and thresholds stay those of the questions as
    they are. keep_questions: a gate that reads hidden states keeps ten questions with theirs, to be compared with a
    server's. command: what the card says it was made by. options: those of the gate, see
    `options_of(fit_function(name))`.
    """
    function, folder = load_fit_function(name), Path(out)
    _check(name, runs, target, threshold)
    _check_max_loss(max_loss, threshold)
    check_seed(seed)
    check_replaceable(folder, GATE_MANIFEST, GATE_KIND)  # before the work, not after it
    paths = resolve_run_paths(runs)
    check_fit_options(name, function, options)
    if balance_sets:
        _check_balance(name, function, len(paths))
    try:
        from knowgate.training.gate_artifact import save_fitted

        examples = _examples(paths, function, target, seed, balance_sets)
        _check_rule(max_loss, examples)
        things = {"seed": seed, "work": checkpoint_folder(folder), "watch": watch or ignore_progress}
        fitted: FitResult = function(examples, **select_injected_arguments(function, things), **options)
        noted = replace(fitted, notes=[*fitted.notes, *_why(examples, function, target)])
        save_fitted(
            noted,
            examples,
            folder,
            command=command,
            threshold=threshold,
            max_loss=max_loss,
            keep_questions=keep_questions,
        )
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("knowgate"):
            raise
        raise MissingExtra(f"fitting {name}", EXTRA) from error
    delete_checkpoint(folder)
    return load_fitted_gate(str(folder))


def list_fittable_gates() -> list[str]:
    """The gates that can be fitted: ours, then those of other packages."""
    own = [name for name, entry in FITTED_GATES.items() if entry.fit]
    return [*own, *sorted(set(find_plugins(FIT_ENTRY_POINTS)) - set(own))]


def load_fit_function(name: str) -> FitFunction:
    """The fit function of a gate. What it can be told is in its signature: see `options_of`."""
    if name in FITTED_GATES and FITTED_GATES[name].fit:
        found: FitFunction = load_target(FITTED_GATES[name].fit, f"fitting {name}", FITTED_GATES[name].extra)
        return found
    outside = find_plugins(FIT_ENTRY_POINTS)
    if name in outside:
        function: FitFunction = load_plugin(outside[name], f"the fit function of '{name}'")
        return function
    if name in find_plugins("knowgate.fitted_gates"):
        raise BadSetting(
            f"the gate '{name}' can be loaded but not fitted: its package has no entry point in '{FIT_ENTRY_POINTS}'."
        )
    raise UnknownName("fitted gate", name, list_fittable_gates())


def _check(name: str, runs: RunsLike, target: str | None, threshold: float | None) -> None:
    if not runs:
        raise BadSetting(f"fit {name} learns from label runs: give --labels RUN, made by knowgate label.")
    if target not in (None, *get_args(Target)):
        raise BadSetting(f"fit {name}: target is '{target}'; allowed: {', '.join(get_args(Target))}.")
    if threshold is not None and not 0 <= threshold <= 1:
        raise BadSetting(f"fit {name}: the threshold is {threshold}; it must be between 0 and 1.")


def _check_max_loss(max_loss: float | None, threshold: float | None) -> None:
    if max_loss is None:
        return
    if threshold is not None:
        raise BadSetting("give --threshold, or --max-loss to have one chosen; not both.")
    if not 0 <= max_loss < 1:
        raise BadSetting(f"the largest loss is {max_loss}; it must be at least 0 and below 1 (0.01 is one point).")


def _check_rule(max_loss: float | None, examples: Examples) -> None:
    if max_loss is not None and examples.target != "benefit":
        raise BadSetting(
            "--max-loss chooses the threshold of a gate fitted on 'benefit'; this one is fitted on "
            f"'{examples.target}', and its threshold is 0.5. Choose another for it with knowgate calibrate."
        )


def _check_balance(name: str, function: FitFunction, runs: int) -> None:
    if runs < 2:
        raise BadSetting("--balance-sets is for several label runs; give --labels more than once, or leave it away.")
    if not read_requirements(function).weighs:
        raise BadSetting(f"fit {name} counts every row the same: it has no --balance-sets. Leave it away.")


def _examples(
    paths: Sequence[Path], function: FitFunction, target: Target | None, seed: int, balanced: bool
) -> Examples:
    wanted = read_requirements(function)
    layers = None if wanted.reads_states else ()
    return load_examples(paths, target=target or wanted.target, layers=layers, seed=seed, balanced=balanced)


def _why(examples: Examples, function: FitFunction, target: Target | None) -> list[str]:
    """Why this target, where rows decided it."""
    without = sum(row.benefit is None for row in examples.rows)
    was_chosen = target is None and read_requirements(function).target is None and examples.target == "known"
    if not (was_chosen and 0 < without < len(examples.rows)):
        return []
    return [f"'known' was chosen because {without} of {len(examples.rows)} rows have no open-book answer"]
