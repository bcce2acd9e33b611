"""How far questions lie from those a gate was fitted on: transfer to other kinds of questions was seen to fail.

The questions of a fit are kept as mean, scale and a few directions of what the gate reads of them anyway: the lowest
layer's state before the answer; where it reads no states, the look of the question. The distance is that of a Gaussian
along these directions and an even one across them, divided by the distance that 99 % of the fit's held-out questions
stay within: above 1 is far. Applied in numpy; older gates have none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from knowgate.core.validation import parse_json
from knowgate.data.signals.vectors import SURFACE_WIDTH, stack_hidden_states, surface_features
from knowgate.errors import ArtifactError, BadInput
from knowgate.gates.artifacts.gate_folder import REFERENCE_FILE, Artifact, Tensors
from knowgate.gates.artifacts.networks import Floats, TensorValidator, check_feature_width
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Model, Question, Reading, SignalRequest, Vector

DISTANCE_PREFIX = "distance."
MAX_DIRECTIONS = 16
MAX_ROWS = 2_000  # enough for 16 directions; more only cost time
EDGE_QUANTILE = 0.99  # of the held-out questions
FAR_DISTANCE = 1.0 + 1e-6  # a question at the very edge is not far, however its distance was rounded
MIN_REPORTED_SHARE = 0.05  # share of far questions above which something is said: one in a hundred is to be expected


def choose_distance_source(layers: Sequence[int]) -> dict[str, Any]:
    """For the manifest: which numbers the distance of a gate that wants these layers is taken of."""
    return {"of": "state", "layer": min(layers)} if layers else {"of": "look"}


def read_distance_features(
    source: Mapping[str, Any], questions: Sequence[Question], readings: Sequence[Reading]
) -> Vector:
    if source["of"] == "state":
        return stack_hidden_states(readings, source["layer"], "pre")
    return surface_features(questions)


def claim_distance_tensors(tensors: TensorValidator, source: Mapping[str, Any] | None) -> None:
    """Claim the tensors that distances are worked out with; a gate of an earlier version has none."""
    if source is None:
        return
    (width,) = tensors.claim(f"{DISTANCE_PREFIX}mean", None if source["of"] == "state" else SURFACE_WIDTH).shape
    tensors.claim(f"{DISTANCE_PREFIX}scale", width, positive=True)
    (_, count) = tensors.claim(f"{DISTANCE_PREFIX}directions", width, None).shape
    for name, size in (("along", count), ("across", 1), ("edge", 1)):
        tensors.claim(f"{DISTANCE_PREFIX}{name}", size, positive=True)


def fit_distance(features: Vector, held_out: Vector) -> dict[str, Vector]:
    """Tensors for `distances`: from the rows a gate learnt from, and others of their kind for what is near."""
    rows = features[:: -(-len(features) // MAX_ROWS)].astype(np.float64)
    scale = rows.std(axis=0)
    mean, scale = rows.mean(axis=0), np.where(scale < 1e-6, 1.0, scale)
    x = (rows - mean) / scale
    variances, directions = np.linalg.eigh(x.T @ x / len(x))
    count = max(1, min(MAX_DIRECTIONS, x.shape[1] // 2, len(x) // 4))
    along, rest = variances[::-1][:count], variances[::-1][count:]
    blocks = {
        "mean": mean,
        "scale": scale,
        "directions": directions[:, ::-1][:, :count],
        "along": np.maximum(along, 1e-6),
        "across": np.array([max(float(rest.mean()) if len(rest) else 0.0, 1e-6)]),
        "edge": np.array([1.0]),
    }
    tensors = {f"{DISTANCE_PREFIX}{name}": block.astype(np.float32) for name, block in blocks.items()}
    edge = np.quantile(compute_distances(tensors, held_out), EDGE_QUANTILE)
    return {**tensors, f"{DISTANCE_PREFIX}edge": np.array([max(float(edge), 1e-6)], dtype=np.float32)}


def compute_distances(tensors: Tensors, features: Vector) -> Floats:
    """One for each row; 1 is as far as 99 % of the fit's own questions reach."""
    mean, scale, directions, along, across, edge = (
        tensors[f"{DISTANCE_PREFIX}{name}"].astype(np.float64)
        for name in ("mean", "scale", "directions", "along", "across", "edge")
    )
    check_feature_width(features, len(mean))
    x = (features.astype(np.float64) - mean) / scale
    inside = x @ directions
    outside = np.maximum((x**2).sum(axis=1) - (inside**2).sum(axis=1), 0.0)
    found: Floats = np.sqrt((inside**2 / along).sum(axis=1) + outside / across[0]) / edge[0]
    return found


def compute_far_share(found: Sequence[float | None]) -> float | None:
    """The share of far questions; None where the gate does not know."""
    known = [distance for distance in found if distance is not None]
    return sum(distance > FAR_DISTANCE for distance in known) / len(known) if known else None


def format_far_warning(gate: str, share: float | None, n: int) -> str:
    """A sentence where more questions are far than chance would have it; else ''."""
    if share is None or share <= MIN_REPORTED_SHARE:
        return ""
    return (
        f"{round(share * n)} of {n} questions lie farther from what the gate '{gate}' was fitted on than 99 % of its "
        "own questions do; its needs may be wrong there. Label some like them and fit again on both: --labels OLD "
        "--labels NEW."
    )


REFERENCE_COUNT = 10  # questions
MIN_COSINE = 0.99  # cosine of every state with its reference
QUESTIONS_KEY = "questions"


@dataclass(frozen=True)
class ReferenceStates:
    """Questions of the fit, and by layer the state of each at the last token of its prompt."""

    questions: list[Question]
    states: Mapping[int, Vector]


@dataclass(frozen=True)
class StateAgreement:
    """cosine: the least of any state with its reference. nearest: questions whose states lie nearest to their own, in
    every layer; n: of how many."""

    cosine: float
    nearest: int
    n: int

    @property
    def holds(self) -> bool:
        return self.cosine >= MIN_COSINE and self.nearest == self.n


def build_reference_files(
    questions: Sequence[Question], readings: Sequence[Reading], layers: Sequence[int]
) -> dict[str, bytes]:
    """A file with ten questions, evenly spread over all of them, and their states; none where there are no states."""
    places = (
        list(dict.fromkeys(np.linspace(0, len(questions) - 1, REFERENCE_COUNT).astype(int).tolist()))
        if questions
        else []
    )
    kept = [readings[place] for place in places]
    if not layers or not kept or any(layer not in reading.hidden for reading in kept for layer in layers):
        return {}
    asked = [
        {"text": one.text, "lang": one.lang, "choices": list(one.choices)} for one in (questions[p] for p in places)
    ]
    states = {str(layer): np.stack([reading.hidden[layer] for reading in kept]) for layer in layers}
    data = save({name: block.astype(np.float32) for name, block in states.items()}, {QUESTIONS_KEY: json.dumps(asked)})
    return {REFERENCE_FILE: data}


def read_reference_states(artifact: Artifact) -> ReferenceStates | None:
    """What was kept; None with gates of earlier versions, or of packed runs."""
    file = artifact.path / REFERENCE_FILE
    if not file.is_file():
        return None
    try:
        with safe_open(str(file), framework="np") as opened:
            states = {int(name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            asked = parse_json((opened.metadata() or {})[QUESTIONS_KEY], REFERENCE_FILE)
        questions = [_question(one) for one in asked]
    except (SafetensorError, BadInput, KeyError, TypeError, ValueError, AttributeError):
        raise artifact.refusal(f"{REFERENCE_FILE} is broken") from None
    if not questions or any(block.ndim != 2 or len(block) != len(questions) for block in states.values()):
        raise artifact.refusal(f"{REFERENCE_FILE} is broken")
    return ReferenceStates(questions, states)


def _question(one: Mapping[str, Any]) -> Question:
    if not isinstance(one["text"], str) or not all(isinstance(choice, str) for choice in one["choices"]):
        raise ValueError("no question")
    return Question(one["text"], lang=one["lang"], choices=tuple(one["choices"]))


def check_state_agreement(artifact: Artifact, model: Model, prompts: AnswerPrompts, want: SignalRequest) -> str:
    """Refuse a server whose states are not those the gate was fitted on; else what is to be said of it."""
    made = artifact.manifest["model"]["name"]
    reference = read_reference_states(artifact)
    if reference is None or not set(want.layers) <= set(reference.states):
        raise ArtifactError(
            f"the gate '{artifact.path.name}' was fitted on {made} and holds no states to compare those of "
            f"{model.name} with. Fit it again with this version, or give --plug-in if you know that they agree."
        )
    asked = [prompts.closed(question) for question in reference.questions]
    found = model.read(asked, SignalRequest(layers=want.layers, resumable=False))
    measured = measure_state_agreement(reference, found, want.layers)
    if not measured.holds:
        raise ArtifactError(
            f"the gate '{artifact.path.name}' was fitted on {made}, and the hidden states of {model.name} are not "
            f"those: on {measured.n} prompts the least cosine is {measured.cosine:.4f} (at least {MIN_COSINE} is needed), "
            f"and {measured.nearest} of {measured.n} lie nearest to their own. Serve the same weights, name the "
            "server's layers in its order (vLLM's last one is that before the final norm), or fit on the server."
        )
    return f"fitted on {made}, whose states the server gives (least cosine {measured.cosine:.4f} on {measured.n})"


def measure_state_agreement(
    reference: ReferenceStates, found: Sequence[Reading], layers: Sequence[int]
) -> StateAgreement:
    least, own = 1.0, np.ones(len(found), dtype=bool)
    for layer in layers:
        wanted, given = reference.states[layer], np.stack([reading.hidden[layer] for reading in found])
        if wanted.shape != given.shape:
            return StateAgreement(0.0, 0, len(found))
        least = min(least, float((_unit(wanted) * _unit(given)).sum(axis=1).min()))
        common = wanted.mean(axis=0)
        close = _unit(given - common) @ _unit(wanted - common).T
        own &= close.argmax(axis=1) == np.arange(len(found))
    return StateAgreement(least, int(own.sum()), len(found))


def _unit(rows: Vector) -> Vector:
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return (rows / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
