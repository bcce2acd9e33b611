"""The verb `fit arbiter`: a mode and label runs in, the fitted arbiter out.

Knows no arbiter: their fit functions come from the table of arbiters. Splitting, calibrating, measuring on questions
held out, the card and the folder are the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from knowgate.arbiters import ARBITER_KIND, ARBITER_MANIFEST, FITTED_ARBITERS, FittedArbiter, load_arbiter
from knowgate.doors import check_seed
from knowgate.errors import BadSetting, MissingExtra, UnknownName
from knowgate.files import check_replaceable
from knowgate.fitting.arbiters.arbiter_result import ArbiterResult
from knowgate.fitting.arbiters.pairs import load_pairs
from knowgate.fitting.fit_options import FitFunction, check_options, handed_to, options_of
from knowgate.fitting.judges.checkpoint import forget_training, training_folder
from knowgate.fitting.steps import WatchFit, unwatched
from knowgate.registry import load_target
from knowgate.runs import Runs, run_paths

EXTRA = "train"


def fit_arbiter(
    runs: Runs,
    *,
    out: str | Path,
    mode: str = "features",
    seed: int = 0,
    watch: WatchFit | None = None,
    command: str = "",
    **options: Any,
) -> FittedArbiter:
    """Fit an arbiter on label runs with both answers, measure it on questions held out, write its folder, load it.

    mode: features (cheap numbers of both answers) or another of the table. options: those of the mode, see
    `options_of(arbiter_fit(mode))`. command: what the card says it was made by.

    Example:
        >>> fit_arbiter("runs/train", out="my-arbiter")  # doctest: +SKIP
    """
    function, folder = arbiter_fit(mode), Path(out)
    if not runs:
        raise BadSetting("fit arbiter learns from label runs: give --labels RUN, made by knowgate label.")
    check_seed(seed)
    check_replaceable(folder, ARBITER_MANIFEST, ARBITER_KIND)  # before the work, not after it
    _check_mode(mode, options)
    check_options(f"arbiter --mode {mode}", function, options)
    try:
        from knowgate.fitting.arbiters.save_arbiter import save_arbiter

        pairs = load_pairs(run_paths(runs), seed)
        things = {"seed": seed, "work": training_folder(folder), "watch": watch or unwatched}
        fitted: ArbiterResult = function(pairs, **handed_to(function, things), **options)
        save_arbiter(fitted, pairs, folder, command=command)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("knowgate"):
            raise
        raise MissingExtra("fitting an arbiter", EXTRA) from error
    forget_training(folder)
    loaded: Any = load_arbiter(str(folder))
    arbiter: FittedArbiter = loaded
    return arbiter


def _check_mode(mode: str, given: Mapping[str, Any]) -> None:
    """An option of another mode names that mode."""
    modes = {name: options_of(arbiter_fit(name)) for name in FITTED_ARBITERS}
    for option in given:
        owner = next((name for name, known in modes.items() if option in known), mode)
        if option not in modes[mode] and owner != mode:
            raise BadSetting(f"'{option}' belongs to fit arbiter --mode {owner}: add --mode {owner}, or leave it out.")


def arbiter_fit(mode: str) -> FitFunction:
    """The fit function of a mode. What it can be told is in its signature: see `options_of`."""
    if mode not in FITTED_ARBITERS:
        raise UnknownName("mode of fit arbiter", mode, FITTED_ARBITERS)
    found: FitFunction = load_target(FITTED_ARBITERS[mode].fit, f"fitting {mode}", FITTED_ARBITERS[mode].extra)
    return found
