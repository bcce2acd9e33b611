"""The hidden states of readings as a matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from knowgate.errors import NotOffered
from knowgate.types import Reading, Vector


def hidden_states(readings: Sequence[Reading], layer: int, position: str) -> Vector:
    """The hidden states of a layer: `pre` at the last prompt token, `post` at the last drafted one."""
    states = [(reading.hidden if position == "pre" else reading.hidden_after).get(layer) for reading in readings]
    given = [state for state in states if state is not None]
    if len(given) < len(states):
        raise NotOffered(
            f"the reading has no hidden states of layer {layer} ({position}). Label with --layers {layer}, or use "
            "a backend that gives hidden states (hf, gguf, smollm).",
            brief=f"no hidden states of layer {layer}",
        )
    return np.stack(given)
