"""How far questions lie from those a gate was fitted on: transfer to other kinds of questions was seen to fail.

The questions of a fit are kept as mean, scale and a few directions of what the gate reads of them anyway: the lowest
layer's state before the answer; where it reads no states, the look of the question. The distance is that of a Gaussian
along these directions and an even one across them, divided by the distance that 99 % of the fit's held-out questions
stay within: above 1 is far. Applied in numpy; older gates have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from knowgate.gates.fitted.artefact import Tensors
from knowgate.gates.fitted.probability import Floats
from knowgate.gates.fitted.tensors import ExpectedTensors, check_width
from knowgate.signals import SURFACE_WIDTH, hidden_states, surface_features
from knowgate.types import Question, Reading, Vector

PREFIX = "distance."
DIRECTIONS = 16
MOST_ROWS = 2_000  # enough for 16 directions; more only cost time
WITHIN = 0.99  # of the held-out questions
FAR = 1.0 + 1e-6  # a question at the very edge is not far, however its distance was rounded
SAID_FROM = 0.05  # share of far questions above which something is said: one in a hundred is to be expected


def what_it_reads(layers: Sequence[int]) -> dict[str, Any]:
    """For the manifest: which numbers the distance of a gate that wants these layers is taken of."""
    return {"of": "state", "layer": min(layers)} if layers else {"of": "look"}


def read_off(source: Mapping[str, Any], questions: Sequence[Question], readings: Sequence[Reading]) -> Vector:
    if source["of"] == "state":
        return hidden_states(readings, source["layer"], "pre")
    return surface_features(questions)


def expect_ground(tensors: ExpectedTensors, source: Mapping[str, Any] | None) -> None:
    """Claim the tensors that distances are worked out with; a gate of an earlier version has none."""
    if source is None:
        return
    (width,) = tensors.claim(f"{PREFIX}mean", None if source["of"] == "state" else SURFACE_WIDTH).shape
    tensors.claim(f"{PREFIX}scale", width, positive=True)
    (_, count) = tensors.claim(f"{PREFIX}directions", width, None).shape
    for name, size in (("along", count), ("across", 1), ("edge", 1)):
        tensors.claim(f"{PREFIX}{name}", size, positive=True)


def measure_ground(features: Vector, held_out: Vector) -> dict[str, Vector]:
    """Tensors for `distances`: from the rows a gate learnt from, and others of their kind for what is near."""
    rows = features[:: -(-len(features) // MOST_ROWS)].astype(np.float64)
    scale = rows.std(axis=0)
    mean, scale = rows.mean(axis=0), np.where(scale < 1e-6, 1.0, scale)
    x = (rows - mean) / scale
    variances, directions = np.linalg.eigh(x.T @ x / len(x))
    count = max(1, min(DIRECTIONS, x.shape[1] // 2, len(x) // 4))
    along, rest = variances[::-1][:count], variances[::-1][count:]
    blocks = {
        "mean": mean,
        "scale": scale,
        "directions": directions[:, ::-1][:, :count],
        "along": np.maximum(along, 1e-6),
        "across": np.array([max(float(rest.mean()) if len(rest) else 0.0, 1e-6)]),
        "edge": np.array([1.0]),
    }
    tensors = {f"{PREFIX}{name}": block.astype(np.float32) for name, block in blocks.items()}
    edge = np.quantile(distances(tensors, held_out), WITHIN)
    return {**tensors, f"{PREFIX}edge": np.array([max(float(edge), 1e-6)], dtype=np.float32)}


def distances(tensors: Tensors, features: Vector) -> Floats:
    """One for each row; 1 is as far as 99 % of the fit's own questions reach."""
    mean, scale, directions, along, across, edge = (
        tensors[f"{PREFIX}{name}"].astype(np.float64)
        for name in ("mean", "scale", "directions", "along", "across", "edge")
    )
    check_width(features, len(mean))
    x = (features.astype(np.float64) - mean) / scale
    inside = x @ directions
    outside = np.maximum((x**2).sum(axis=1) - (inside**2).sum(axis=1), 0.0)
    found: Floats = np.sqrt((inside**2 / along).sum(axis=1) + outside / across[0]) / edge[0]
    return found


def far_share(found: Sequence[float | None]) -> float | None:
    """The share of far questions; None where the gate does not know."""
    known = [distance for distance in found if distance is not None]
    return sum(distance > FAR for distance in known) / len(known) if known else None


def far_words(gate: str, share: float | None, n: int) -> str:
    """A sentence where more questions are far than chance would have it; else ''."""
    if share is None or share <= SAID_FROM:
        return ""
    return (
        f"{round(share * n)} of {n} questions lie farther from what the gate '{gate}' was fitted on than 99 % of its "
        "own questions do; its needs may be wrong there. Label some like them and fit again on both: --labels OLD "
        "--labels NEW."
    )
