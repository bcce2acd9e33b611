"""Two checks that a gate is used on the kind of data that it was fitted on: distance of questions, agreement of states.

Distance: a gate can fail on kinds of questions that it was not trained on. The training questions are summarized by
mean, scale and principal directions of features that the gate reads anyway: its lowest hidden state, or surface
features of the question if it reads none. The distance of a question is a Mahalanobis distance, with one common
variance for the remaining directions. It is divided by the 99 % quantile of held-out questions, so that more than 1 is
far. Older gates have no distance.

Agreement: the fingerprint of a served model differs from that of its weights, so only the hidden states show whether
the server runs the weights that the gate was fitted on. Ten training questions are stored with their states, and the
states of the server must have nearly the same direction (cosine). States of one layer are similar for all questions (a
cosine of .995 on the embedded model). Therefore each state must also be closest to that of its own question after the
common mean is subtracted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from knowgate.core.validation import parse_json
from knowgate.data.signals.vectors import SURFACE_WIDTH, stack_hidden_states, surface_features
from knowgate.errors import ArtifactError, BadInput
from knowgate.gates.artifacts.gate_folder import REFERENCE_FILE, Artifact, Tensors
from knowgate.gates.artifacts.networks import TensorValidator, check_feature_width
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.types import Model, Question, Reading, SignalRequest, Vector

DISTANCE_PREFIX = "distance."
MAX_DIRECTIONS = 16  # maximum number of principal directions
MAX_ROWS = 2_000  # training questions to use; enough to estimate 16 directions
EDGE_QUANTILE = 0.99  # questions farther away than this share of held-out questions are far
FAR_DISTANCE = 1.0 + 1e-6  # tolerates rounding of questions at the edge
MIN_DEVIATION = 1e-6  # smaller deviations, variances and distances are rounding errors
MIN_REPORTED_SHARE = 0.05  # warn if more than this share of questions is far; .01 is expected by chance

REFERENCE_COUNT = 10  # training questions that are stored with their hidden states
MIN_COSINE = 0.99  # minimum cosine between a state of the server and the stored state
QUESTIONS_KEY = "questions"  # metadata field of the reference file that holds the questions


# --- distance from the training questions ---------------------------------------------------------


def choose_distance_source(layers: Sequence[int]) -> dict[str, Any]:
    """Choose the features for comparing a question with the training questions.

    These are the hidden states of the lowest layer that the gate reads. If the gate reads none, they are surface
    features of the text ('look'), such as its length.

    Args:
        layers: The layers whose hidden states the gate reads.

    Returns:
        The field `distance` of the manifest.
    """
    return {"of": "state", "layer": min(layers)} if layers else {"of": "look"}


def read_distance_features(
    source: Mapping[str, Any], questions: Sequence[Question], readings: Sequence[Reading]
) -> Vector:
    """Return the features for comparing questions with the training questions.

    Args:
        source: The field `distance` of the manifest. Its key `of` is 'state' for the hidden states of a layer, or 'look'
            for features of the text, such as its length.
        questions: The questions.
        readings: Signals of the LLM for each question, with its hidden states.
    """
    if source["of"] == "state":
        return stack_hidden_states(readings, source["layer"], "pre")  # the state before the answer
    return surface_features(questions)


def require_distance_tensors(tensors: TensorValidator, source: Mapping[str, Any] | None) -> None:
    """Check the tensors for measuring how far a question is from the training questions.

    Args:
        tensors: The tensors of the gate.
        source: The field `distance` of the manifest; None for gates of older versions, which have no such tensors.
    """
    if source is None:
        return
    expected_width = None if source["of"] == "state" else SURFACE_WIDTH  # the size of a state depends on the LLM
    width = tensors.require(f"{DISTANCE_PREFIX}mean", expected_width).shape[0]
    tensors.require(f"{DISTANCE_PREFIX}scale", width, positive=True)
    n_directions = tensors.require(f"{DISTANCE_PREFIX}directions", width, None).shape[1]
    # 'along' and 'across' are variances in the principal and in all other directions. 'edge' is a quantile of distances.
    for name, size in (("along", n_directions), ("across", 1), ("edge", 1)):
        tensors.require(f"{DISTANCE_PREFIX}{name}", size, positive=True)


def fit_distance(features: Vector, held_out: Vector) -> dict[str, Vector]:
    """Fit a Mahalanobis distance between a question and the training questions.

    99 % of `held_out` get a distance below 1.

    Args:
        features: Features of the training questions, one row per question.
        held_out: Features of questions of the same kind that the gate was not trained on.

    Returns:
        The tensors that `compute_distances` needs, by name.
    """
    step = math.ceil(len(features) / MAX_ROWS)
    rows = features[::step].astype(np.float64)  # at most MAX_ROWS, evenly spaced
    mean = rows.mean(axis=0)
    deviation = rows.std(axis=0)
    scale = np.where(deviation < MIN_DEVIATION, 1.0, deviation)  # constant features are not divided by zero
    axes = _find_principal_axes((rows - mean) / scale)
    arrays = {"mean": mean, "scale": scale, **axes, "edge": np.array([1.0])}
    tensors = {f"{DISTANCE_PREFIX}{name}": array.astype(np.float32) for name, array in arrays.items()}
    # Distances are divided by the edge. So an edge of 1 gives the distances from whose quantile the real edge follows.
    edge = float(np.quantile(compute_distances(tensors, held_out), EDGE_QUANTILE))
    tensors[f"{DISTANCE_PREFIX}edge"] = np.array([max(edge, MIN_DEVIATION)], dtype=np.float32)
    return tensors


def _find_principal_axes(standardized: FloatArray) -> dict[str, FloatArray]:
    """Find the principal directions of features, their variances, and the mean variance in all other directions."""
    n_rows, n_features = standardized.shape
    variances, directions = np.linalg.eigh(standardized.T @ standardized / n_rows)
    # eigh returns the smallest variance first, but here the largest comes first.
    variances, directions = variances[::-1], directions[:, ::-1]
    count = max(1, min(MAX_DIRECTIONS, n_features // 2, n_rows // 4))
    variance_across = float(variances[count:].mean()) if n_features > count else 0.0
    return {
        "directions": directions[:, :count],
        "along": np.maximum(variances[:count], MIN_DEVIATION),
        "across": np.array([max(variance_across, MIN_DEVIATION)]),
    }


def compute_distances(tensors: Tensors, features: Vector) -> FloatArray:
    """Compute how far each row of features is from the training questions.

    99 % of similar questions have a distance below 1.
    """

    def get(name: str) -> FloatArray:
        return np.asarray(tensors[f"{DISTANCE_PREFIX}{name}"].astype(np.float64))

    check_feature_width(features, len(get("mean")))
    x = (features.astype(np.float64) - get("mean")) / get("scale")
    components = (x @ get("directions")) ** 2  # squared, one column per principal direction
    remaining = np.maximum((x**2).sum(axis=1) - components.sum(axis=1), 0.0)  # squared, in all other directions
    # Each component is divided by its variance: 'along' its principal direction, or 'across' all of them.
    squared_distance = (components / get("along")).sum(axis=1) + remaining / get("across")[0]
    edge = get("edge")[0]  # the 99 % quantile of the distances of held-out questions
    return np.asarray(np.sqrt(squared_distance) / edge)


def compute_far_share(distances: Sequence[float | None]) -> float | None:
    """Compute the share of questions far from the training questions. Unknown distances are left out."""
    known = [distance for distance in distances if distance is not None]
    if not known:
        return None
    return sum(distance > FAR_DISTANCE for distance in known) / len(known)


def format_far_warning(gate: str, share: float | None, n: int) -> str:
    """Return a warning if many questions are unlike the training questions of a gate.

    Args:
        gate: Name of the gate.
        share: Share of questions that are far from the training questions; None if unknown.
        n: Number of questions.

    Returns:
        The warning; '' if the share is unknown or at most MIN_REPORTED_SHARE.
    """
    if share is None or share <= MIN_REPORTED_SHARE:
        return ""
    return (
        f"{round(share * n)} of {n} questions are unlike those that gate '{gate}' was trained on, so its decisions "
        "about them may be wrong. Label some questions of this kind and fit the gate again on both label runs."
    )


# --- agreement of hidden states -------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceStates:
    """Training questions stored with a gate, and their hidden states by layer.

    Each state belongs to the last token of the prompt.
    """

    questions: list[Question]
    states: Mapping[int, Vector]


@dataclass(frozen=True)
class StateAgreement:
    """Agreement between a server's hidden states and the states stored with a gate.

    Attributes:
        cosine: Smallest cosine between a state and the stored state of the same question.
        nearest: Number of questions whose state is closest to its own stored state in every layer.
        n: Number of questions.
    """

    cosine: float
    nearest: int
    n: int

    @property
    def is_sufficient(self) -> bool:
        """Whether the states are equal up to rounding, so that the server runs the same weights."""
        return self.cosine >= MIN_COSINE and self.nearest == self.n


def build_reference_files(
    questions: Sequence[Question], readings: Sequence[Reading], layers: Sequence[int]
) -> dict[str, bytes]:
    """Build a file of ten training questions with their hidden states.

    With it, a gate later recognizes its LLM on a server.

    Returns:
        The content of the file by its name. Empty if there are no questions, or if a hidden state is missing.
    """
    if not questions or not layers:
        return {}
    # The numbers of ten evenly spaced questions; fewer if there are not as many.
    rows = sorted(set(np.linspace(0, len(questions) - 1, REFERENCE_COUNT).astype(int).tolist()))
    hidden = [readings[row].hidden for row in rows]
    if not all(set(layers) <= set(states) for states in hidden):
        return {}
    tensors = {str(layer): np.stack([states[layer] for states in hidden]).astype(np.float32) for layer in layers}
    records = [_format_question(questions[row]) for row in rows]
    return {REFERENCE_FILE: save(tensors, {QUESTIONS_KEY: json.dumps(records)})}


def _format_question(question: Question) -> dict[str, Any]:
    """Convert a question to a JSON record of the reference file."""
    return {"text": question.text, "lang": question.lang, "choices": list(question.choices)}


def read_reference_states(artifact: Artifact) -> ReferenceStates | None:
    """Read the training questions and hidden states stored with a gate, or None.

    Raises:
        ArtifactError: The reference file is damaged.
    """
    file = artifact.path / REFERENCE_FILE
    if not file.is_file():
        return None
    try:
        return _parse_reference_file(file)
    except (SafetensorError, BadInput, KeyError, TypeError, ValueError, AttributeError):
        raise artifact.make_error(f"{REFERENCE_FILE} is broken") from None


def _parse_reference_file(file: Path) -> ReferenceStates:
    """Parse a reference file. Every layer must have one hidden state per question."""
    with safe_open(str(file), framework="np") as reference:
        states = {int(layer): reference.get_tensor(layer) for layer in reference.keys()}  # noqa: SIM118 - no mapping
        records = parse_json(reference.metadata()[QUESTIONS_KEY], REFERENCE_FILE)
    questions = [_parse_question(record) for record in records]
    if not questions or any(block.ndim != 2 or len(block) != len(questions) for block in states.values()):
        raise ValueError("a layer does not have exactly one hidden state per question")
    return ReferenceStates(questions, states)


def _parse_question(record: Mapping[str, Any]) -> Question:
    """Convert a JSON record of the reference file to a question."""
    if not isinstance(record["text"], str) or not all(isinstance(choice, str) for choice in record["choices"]):
        raise ValueError("not a question")
    return Question(record["text"], lang=record["lang"], choices=tuple(record["choices"]))


def check_state_agreement(artifact: Artifact, model: Model, prompts: AnswerPrompts, request: SignalRequest) -> str:
    """Check that a server runs the LLM of a gate: the server's hidden states must equal the stored states.

    Args:
        artifact: The fitted gate.
        model: The server.
        prompts: The answer prompts.
        request: The signals that the gate reads; only its layers are compared.

    Returns:
        A note for decisions that names the model the gate was fitted on.

    Raises:
        ArtifactError: The states differ, or the gate stores no states to compare with.
    """
    trained_on = artifact.manifest["model"]["name"]
    reference = read_reference_states(artifact)
    if reference is None or not set(request.layers) <= set(reference.states):
        raise ArtifactError(
            f"cannot compare the hidden states of {model.name} with those of {trained_on}. Fit gate "
            f"'{artifact.path.name}' again. If both have the same weights, set plug_in=True."
        )
    closed_book_prompts = [prompts.closed(question) for question in reference.questions]
    readings = model.read(closed_book_prompts, SignalRequest(layers=request.layers, resumable=False))
    agreement = measure_state_agreement(reference, readings, request.layers)
    if not agreement.is_sufficient:
        raise _make_disagreement_error(artifact, model, agreement)
    measured = f"smallest cosine {agreement.cosine:.4f} on {agreement.n} prompts"
    return f"fitted on {trained_on}, whose states the server returns ({measured})"


def _make_disagreement_error(artifact: Artifact, model: Model, agreement: StateAgreement) -> ArtifactError:
    """Build the error for a server whose hidden states differ from the stored ones."""
    trained_on = artifact.manifest["model"]["name"]
    return ArtifactError(
        f"the hidden states of {model.name} differ from those of {trained_on}, on which the gate "
        f"'{artifact.path.name}' was fitted. On {agreement.n} prompts the smallest cosine is {agreement.cosine:.4f} "
        f"(required: {MIN_COSINE}). {agreement.nearest} of {agreement.n} states are closest to the stored state of the "
        "same prompt. Serve the same weights, list the layers in the server's order, or fit the gate on this server."
    )


def measure_state_agreement(
    reference: ReferenceStates, readings: Sequence[Reading], layers: Sequence[int]
) -> StateAgreement:
    """Compare the hidden states of a server with the stored states of a gate.

    A question matches if, in every layer, the server's state is nearest to the stored state of the same question.

    Args:
        reference: The stored questions and states.
        readings: What the server returns for these questions, in the same order.
        layers: Layers to compare.

    Returns:
        The worst agreement over all layers; no agreement at all if the states have different sizes.
    """
    min_cosine = 1.0
    matches = np.ones(len(readings), dtype=bool)
    for layer in layers:
        expected = reference.states[layer]
        actual = np.stack([reading.hidden[layer] for reading in readings])
        if expected.shape != actual.shape:
            return StateAgreement(cosine=0.0, nearest=0, n=len(readings))
        cosines = (_normalize(expected) * _normalize(actual)).sum(axis=1)
        min_cosine = min(min_cosine, float(cosines.min()))
        matches &= _mark_nearest(expected, actual)
    return StateAgreement(min_cosine, nearest=int(matches.sum()), n=len(readings))


def _mark_nearest(expected: Vector, actual: Vector) -> BoolArray:
    """Return for each actual state whether the expected state of its question is closest."""
    # States of a layer are similar for all questions, so their mean is subtracted before they are compared.
    mean = expected.mean(axis=0)
    similarities = _normalize(actual - mean) @ _normalize(expected - mean).T
    return np.asarray(similarities.argmax(axis=1) == np.arange(len(actual)))


def _normalize(rows: Vector) -> Vector:
    """Scale each row to length 1. Rows of zeros stay unchanged."""
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return (rows / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
