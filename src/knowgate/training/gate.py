"""Fit a gate on label runs: `fit` loads the data, trains, calibrates, measures and writes the gate's folder.

The fit functions come from the table of gates, or from entry points of other packages: the group
'knowgate.fitted_gates' names a gate's class and 'knowgate.fits' its fit function, both under the gate's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from knowgate.core.files import check_replaceable
from knowgate.core.options import Options, Seed, Share, option, with_options
from knowgate.core.registry import find_plugins, load_plugin, load_target
from knowgate.data.runs.folder import RunsLike, resolve_run_paths
from knowgate.errors import BadSetting, UnknownName, require_extra
from knowgate.gates import FITTED_GATES, load_fitted_gate
from knowgate.gates.artifacts.gate_folder import GATE_KIND, GATE_MANIFEST
from knowgate.gates.fitted_gate import FittedGate
from knowgate.training import fit_function
from knowgate.training.examples import Examples, Target, load_examples
from knowgate.training.judges.checkpoint import checkpoint_folder, delete_checkpoint

FIT_ENTRY_POINTS = "knowgate.fits"


class FitOptions(Options):
    """Options that all gates share when they are fitted."""

    target: Target | None = option(
        None,
        "What the gate learns: `known` (the LLM knows the answer), `benefit` (passages turn a wrong answer right), "
        "`gain` (P(right with passages) minus P(right from memory)) or `agree` (both answers agree; needs no gold "
        "answers). Default: chosen from the label runs.",
        metavar="TARGET",
    )
    threshold: Share | None = option(
        None,
        "Retrieve if the gate's score is above this threshold. Default: the best threshold within `max_loss`. Without "
        "recorded answers with passages: 0.5.",
        metavar="0..1",
    )
    max_loss: float | None = option(
        None,
        "How much accuracy on held-out questions the default threshold may lose, compared with always retrieving. "
        "Default: 0.01.",
        ge=0,
        lt=1,
        metavar="0..1",
    )
    keep_questions: bool = option(
        True,
        "Store ten questions with the gate, to check later whether a server returns the same hidden states.",
        flag="--keep-questions/--no-questions",
    )
    seed: Seed = option(0, "Random seed of splits and training.")


@with_options(FitOptions)
def fit(
    name: str,
    runs: RunsLike,
    *,
    out: str | Path,
    options: FitOptions,
    watch: fit_function.FitProgressCallback | None = None,
    command: str = "",
    **gate_options: Any,
) -> FittedGate:
    """Fit a gate on label runs, measure it on held-out questions and write its folder.

    Args:
        name: A gate that can be fitted, such as "fusion" or "probe".
        runs: One or more label runs.
        out: Folder of the gate.
        options: Options that all gates share; they can also be given as keywords.
        watch: Callback that receives the progress.
        command: The command line that the model card shows.
        **gate_options: Options of the gate; see `read_fit_options(load_fit_function(name))`.

    Returns:
        The gate, loaded from its folder.

    Raises:
        BadSetting: An option is unknown or has a value that is not allowed.
        BadInput: The label runs have too few questions, or too few of one class.
        MissingExtra: The packages for training are not installed.

    Example:
        >>> gate = fit("fusion", "runs/train", out="my-gate", cheap=True)  # doctest: +SKIP
    """
    function, folder = load_fit_function(name), Path(out)
    _check_arguments(name, runs, options)
    fit_function.check_fit_options(name, function, gate_options)
    check_replaceable(folder, GATE_MANIFEST, GATE_KIND)  # Fail before the training, not after it.
    with require_extra(f"fitting {name}", "train"):
        from knowgate.training.gate_artifact import save_fitted

        examples = _load_examples(resolve_run_paths(runs), function, options)
        result = fit_function.call_fit_function(
            function, examples, gate_options, seed=options.seed, work=checkpoint_folder(folder), watch=watch
        )
        save_options = options.model_dump(include={"threshold", "max_loss", "keep_questions"})
        save_fitted(result, examples, folder, command=command, **save_options)
    delete_checkpoint(folder)
    return load_fitted_gate(str(folder))


def _check_arguments(name: str, runs: RunsLike, options: FitOptions) -> None:
    """Raise BadSetting if there are no label runs, or if options exclude each other."""
    if not runs:
        raise BadSetting(f"gate '{name}' learns from recorded answers. Set `labels` to folders of `knowgate label`.")
    if options.max_loss is not None and options.threshold is not None:
        raise BadSetting(
            "`threshold` and `max_loss` are mutually exclusive. Give only one: `max_loss` chooses a threshold itself."
        )


def list_fittable_gates() -> list[str]:
    """List the names of the gates that can be fitted: first built-in gates, then plugins."""
    built_in = [name for name, entry in FITTED_GATES.items() if entry.fit]
    return [*built_in, *sorted(set(find_plugins(FIT_ENTRY_POINTS)) - set(built_in))]


def load_fit_function(name: str) -> fit_function.FitFunction:
    """Load the function that trains a gate, from this package or from a plugin.

    Raises:
        UnknownName: There is no such gate, or it comes from a plugin that provides no fit function.
    """
    entry = FITTED_GATES.get(name)
    if entry is not None and entry.fit:
        return cast(fit_function.FitFunction, load_target(entry.fit, f"fitting {name}", entry.extra))
    plugins = find_plugins(FIT_ENTRY_POINTS)
    if name in plugins:
        return cast(fit_function.FitFunction, load_plugin(plugins[name], f"the fit function of '{name}'"))
    raise UnknownName("fitted gate", name, list_fittable_gates())


def _load_examples(paths: Sequence[Path], function: fit_function.FitFunction, options: FitOptions) -> Examples:
    """Load label runs as training data for a fit function.

    Raises:
        BadSetting: An option cannot be used with this fit function, or with these label runs.
    """
    required = fit_function.read_requirements(function)
    if options.target == "gain" and not required.two_heads:
        raise BadSetting(
            "target='gain' works only with the gates 'fusion' and 'gain'. Fit one of them, or use target='benefit'."
        )
    layers = None if required.reads_states else ()  # None: hidden states of all layers
    examples = load_examples(paths, target=options.target or required.target, layers=layers, seed=options.seed)
    if options.max_loss is not None and examples.table.open_book_right is None:
        raise BadSetting(
            f"max_loss={options.max_loss} needs answers with passages, but the label runs (recorded answers) have none. Run "
            "`knowgate label` with `index`, or leave `max_loss` out."
        )
    return examples
