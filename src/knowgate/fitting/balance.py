"""As many known as unknown questions in every split: what CBDR trains and tests its probe on (section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadSetting
from knowgate.fitting.examples import Examples
from knowgate.statistics import Bools

SIZES = {"train": 1_000, "dev": 300, "test": 500}  # of each kind; the calibration split stays as it is


@dataclass(frozen=True)
class Balanced:
    """Examples with even splits, and how many of each kind they have, in words."""

    examples: Examples
    notes: list[str]


def balance(examples: Examples, seed: int) -> Balanced:
    """The paper's numbers of each kind where the run has them, else as many as the rarer kind."""
    if examples.target != "known":
        raise BadSetting(
            f"--balanced makes CBDR's probe of what the LLM knows; this fit learns '{examples.target}'. "
            "Add --target known."
        )
    parts = {name: drawn(getattr(examples.split, name), examples.needed, most, seed) for name, most in SIZES.items()}
    counts = {name: len(places) // 2 for name, places in parts.items()}
    said = ", ".join(f"{name} {count} + {count}" for name, count in counts.items())
    short = [f"{most} + {most} for {name}" for name, most in SIZES.items() if counts[name] < most]
    lacking = f"; the runs are too small for the paper's {', '.join(short)}" if short else ""
    return Balanced(replace(examples, split=replace(examples.split, **parts)), [f"balanced: {said}{lacking}"])


def drawn(places: NDArray[np.int64], needed: Bools, most: int, seed: int) -> NDArray[np.int64]:
    """Equally many of both kinds, `most` of each at most, drawn by the seed, in the order of the rows."""
    kinds = [places[needed[places]], places[~needed[places]]]
    size = min(most, *map(len, kinds))
    rng = np.random.default_rng(seed)
    return np.sort(np.concatenate([rng.choice(kind, size, replace=False) for kind in kinds])).astype(np.int64)
