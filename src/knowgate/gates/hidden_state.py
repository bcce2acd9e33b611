"""Gates that classify a hidden state of the LLM: the probe of CBDR, and UAR with its decision tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from knowgate.core.schema import read_record
from knowgate.data.signals.vectors import stack_hidden_states
from knowgate.gates.artifacts import networks
from knowgate.gates.artifacts.gate_folder import Tensors
from knowgate.gates.artifacts.gate_manifest import CalibrationRecord, StatePosition, check_calibration
from knowgate.gates.fitted_gate import FittedGate
from knowgate.stats.logistic import sigmoid
from knowgate.stats.metrics import FloatArray
from knowgate.types import GateScores, Question, Reading, Vector

CRITERIA = ("intent", "knowledge", "time")  # asks for sources, needs knowledge, changes with time
SELF_HEAD = "self"  # unknown to the LLM


@dataclass(frozen=True)
class ProbeOptions:
    """Which hidden state a probe reads, and with what classifier."""

    layer: int
    position: StatePosition
    kind: Literal["mlp", "linear"] = "mlp"


@dataclass(frozen=True)
class ProbeGate(FittedGate):
    """Classifies one hidden state with a small network, before the answer or after the draft.

    Needs: hidden. Cost per question: less than 1 % of the pass; before the answer, a retrieved question pays half a
    prefill and nothing else.
    Reference: Jin et al. (CBDR), section 3.1.

    Example:
        >>> gate = ProbeGate.load("my-probe")  # doctest: +SKIP
    """

    def check(self, tensors: networks.TensorValidator) -> None:
        """Check the options and the network."""
        read_record(ProbeOptions, self.artifact.options, "options", ignore_unknown=True)
        networks.claim_network(tensors)
        tensors.finish()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Apply the network to the hidden states."""
        options = self.artifact.options
        states = stack_hidden_states(readings, options["layer"], options["position"])
        return networks.apply_network(self.artifact.tensors, states)


@dataclass(frozen=True)
class HeadProbabilities:
    """The probability of each UAR head that its criterion asks for retrieval, one value per question."""

    intent: FloatArray
    knowledge: FloatArray
    time: FloatArray
    self_: FloatArray


@dataclass(frozen=True)
class UarOptions:
    """Options of a UAR gate, with one calibration for each of `CRITERIA`."""

    layer: int
    tree: Literal["soft", "hard"]
    calibrations: tuple[CalibrationRecord, CalibrationRecord, CalibrationRecord]


@dataclass(frozen=True)
class UarGate(FittedGate):
    """Combines four linear heads on one hidden state in a decision tree: intent, knowledge, time, self.

    `tree='hard'` is the tree of the paper: a request for sources has need 1, a question that takes no knowledge 0, one
    whose answer changes with time 1, and any other the probability that the LLM does not know. 'soft', the default,
    is the probability of reaching "retrieve" if every node is passed with its head's probability; it is graded, so
    that one threshold controls all of it. The first three heads are calibrated on labeled questions, the last one on
    the label run.

    Needs: hidden. Cost per question: less than 1 % of the pass; a retrieved question pays one prefill.
    Reference: Cheng et al. 2024 (UAR); the heads are trained differently, see `knowgate.training.uar`.

    Example:
        >>> gate = UarGate.load("my-uar")  # doctest: +SKIP
    """

    def check(self, tensors: networks.TensorValidator) -> None:
        """Check the options and the tensors of all heads."""
        options = read_record(UarOptions, self.artifact.options, "options", ignore_unknown=True)
        for calibration in options.calibrations:
            check_calibration(calibration, "options")
        (width,) = tensors.claim(f"{SELF_HEAD}.weight", None).shape
        for name in CRITERIA:
            tensors.claim(f"{name}.weight", width)
        _claim_scales(tensors, width)
        tensors.finish()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute the score of the last head only, which is the one that a label run can calibrate."""
        return apply_head(self.artifact.tensors, SELF_HEAD, self._get_states(readings))

    def predict_heads(self, questions: Sequence[Question], readings: Sequence[Reading]) -> HeadProbabilities:
        """Return the calibrated probabilities of all heads."""
        unknown = np.array(self.calibrate(self.raw_scores(questions, readings)))
        calibrations = self.artifact.options["calibrations"]
        return apply_heads(self.artifact.tensors, calibrations, self._get_states(readings), unknown)

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Compute the needs with the decision tree."""
        if not questions:
            return []
        apply_tree = apply_hard_tree if self.artifact.options["tree"] == "hard" else apply_soft_tree
        return [float(need) for need in np.clip(apply_tree(self.predict_heads(questions, readings)), 0.0, 1.0)]

    def score_with_raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> GateScores:
        """Return the needs of the tree, with the raw scores of the last head."""
        return GateScores(self.score(questions, readings), self.raw_scores(questions, readings))

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """List the probabilities of all heads."""
        if not questions:
            return []
        heads = self.predict_heads(questions, readings)
        return [
            f"asks for sources {intent:.2f}, needs knowledge {knowledge:.2f}, "
            f"time-sensitive {time:.2f}, unknown {unknown:.2f}"
            for intent, knowledge, time, unknown in zip(
                heads.intent, heads.knowledge, heads.time, heads.self_, strict=True
            )
        ]

    def _get_states(self, readings: Sequence[Reading]) -> Vector:
        """Return the hidden states before the answer."""
        return stack_hidden_states(readings, self.artifact.options["layer"], "pre")


def _claim_scales(tensors: networks.TensorValidator, width: int) -> None:
    """Claim the mean and scale of each head, or the single scale that older folders have."""
    if "size" in tensors:
        tensors.claim("size", 1, positive=True)
        return
    for name in (SELF_HEAD, *CRITERIA):
        tensors.claim(f"{name}.mean", width)
        tensors.claim(f"{name}.scale", width, positive=True)


def apply_heads(
    tensors: Tensors, calibrations: Sequence[Mapping[str, Any]], states: Vector, unknown: FloatArray
) -> HeadProbabilities:
    """Compute the probabilities of all heads.

    Args:
        tensors: Weights of the heads.
        calibrations: One for each of `CRITERIA`.
        states: Hidden states, one row per question.
        unknown: Calibrated probabilities of the last head.
    """
    intent, knowledge, time = (
        networks.apply_calibration(apply_head(tensors, name, states), calibration)
        for name, calibration in zip(CRITERIA, calibrations, strict=True)
    )
    return HeadProbabilities(intent, knowledge, time, unknown)


def apply_hard_tree(heads: HeadProbabilities) -> FloatArray:
    """Apply the decision tree of the paper, with each decision at 0.5."""
    after_time = np.where(heads.time > 0.5, 1.0, heads.self_)
    after_knowledge = np.where(heads.knowledge > 0.5, after_time, 0.0)
    return np.where(heads.intent > 0.5, 1.0, after_knowledge)


def apply_soft_tree(heads: HeadProbabilities) -> FloatArray:
    """Compute the probability of reaching "retrieve": i + (1 - i) k (t + (1 - t) s)."""
    after_time = heads.time + (1 - heads.time) * heads.self_
    return heads.intent + (1 - heads.intent) * heads.knowledge * after_time


def apply_head(tensors: Tensors, name: str, states: Vector) -> FloatArray:
    """Compute sigmoid(w . (state - mean) / scale), without a bias.

    Heads of older folders have one common scale instead, the root mean square of the training states.
    """
    weight = tensors[f"{name}.weight"].astype(np.float64)
    networks.check_feature_width(states, len(weight))
    if f"{name}.mean" in tensors:
        inputs = (states.astype(np.float64) - tensors[f"{name}.mean"]) / tensors[f"{name}.scale"]
    else:
        inputs = states.astype(np.float64) / float(tensors["size"][0])
    return sigmoid(inputs @ weight)
