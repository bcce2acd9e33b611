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
from knowgate.stats.metrics import FloatArray, sigmoid
from knowgate.types import GateScores, Question, Reading, Vector

# UAR asks four questions, each with a linear classifier (head) on the same hidden state. "intent": does the user ask
# for sources? "knowledge": does the question need knowledge? "time": does the answer change with time?
CRITERIA = ("intent", "knowledge", "time")
SELF_HEAD = "self"  # does the LLM not know the answer?


@dataclass(frozen=True)
class ProbeOptions:
    """Which hidden state a probe reads, and the kind of its classifier.

    Attributes:
        layer: Layer of the hidden state.
        position: 'pre' reads the state before the answer, 'post' the state after the draft.
        kind: 'mlp' is a small neural network, 'linear' a linear classifier.
    """

    layer: int
    position: StatePosition
    kind: Literal["mlp", "linear"] = "mlp"


@dataclass(frozen=True)
class ProbeGate(FittedGate):
    """Predicts with a small neural network from one hidden state whether to retrieve.

    The state is read before the answer or after the draft.

    Needs: hidden. Cost per question: less than 1 % of the LLM's pass. If the state is read before the answer and the gate
    retrieves, the LLM has run the prompt without passages through the layers below the state in vain.
    Reference: Jin et al. (CBDR), section 3.1.

    Example:
        >>> gate = ProbeGate.load("my-probe")  # doctest: +SKIP
    """

    def check(self, tensors: networks.TensorValidator) -> None:
        """Raise BadInput if the options or the tensors of the network are wrong."""
        read_record(ProbeOptions, self.artifact.options, "options", ignore_unknown=True)
        networks.require_network(tensors)
        tensors.reject_unknown()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute the uncalibrated need for retrieval from the hidden states."""
        options = self.artifact.options
        states = stack_hidden_states(readings, options["layer"], options["position"])
        return networks.apply_network(self.artifact.tensors, states)


@dataclass(frozen=True)
class HeadProbabilities:
    """Predictions of the four classifiers (heads) of UAR, one value per question.

    Attributes:
        intent: The user asks for sources.
        knowledge: The question needs knowledge to answer.
        time: The answer changes with time.
        self_: The LLM does not know the answer.
    """

    intent: FloatArray
    knowledge: FloatArray
    time: FloatArray
    self_: FloatArray


@dataclass(frozen=True)
class UarOptions:
    """Options of a UAR gate, a decision tree of four classifiers (heads).

    Attributes:
        layer: Layer of the hidden state.
        tree: 'hard' branches at probabilities of 0.5, 'soft' weights the branches by their probabilities.
        calibrations: Calibrations of the heads intent, knowledge and time, in this order.
    """

    layer: int
    tree: Literal["soft", "hard"]
    calibrations: tuple[CalibrationRecord, CalibrationRecord, CalibrationRecord]


@dataclass(frozen=True)
class UarGate(FittedGate):
    """Combines four linear classifiers (heads) of one hidden state in a decision tree.

    Each head answers a question. Does the user ask for sources (intent)? Is knowledge needed? Does the answer change
    with time? Does the LLM not know the answer (self)?

    `tree='hard'` is the tree of the paper. It retrieves if the user asks for sources. Otherwise, it skips retrieval if no
    knowledge is needed. Otherwise, it retrieves if the answer changes with time. For all other questions, the need is
    the probability of the head 'self'. `tree='soft'`, the default, takes each branch with the probability of its head.
    So one threshold controls the whole tree.

    Needs: hidden. Cost per question: less than 1 % of the LLM's pass. A retrieved question costs one prefill more.
    Reference: Cheng et al. 2024 (UAR). The heads are trained differently, see `knowgate.training.uar`.

    Example:
        >>> gate = UarGate.load("my-uar")  # doctest: +SKIP
    """

    def check(self, tensors: networks.TensorValidator) -> None:
        """Check the options, and the weights of the four heads (linear classifiers). Raise BadInput if one is wrong.

        All heads read the same hidden state, so they have the same number of weights.
        """
        options = read_record(UarOptions, self.artifact.options, "options", ignore_unknown=True)
        for calibration in options.calibrations:
            check_calibration(calibration, "options")
        (state_size,) = tensors.require(f"{SELF_HEAD}.weight", None).shape  # the first head may have any size
        for name in CRITERIA:
            tensors.require(f"{name}.weight", state_size)
        _require_scales(tensors, state_size)
        tensors.reject_unknown()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute with the head 'self' the uncalibrated probability that the LLM does not know the answer.

        This head is one of four. `score` combines all four.
        """
        return apply_head(self.artifact.tensors, SELF_HEAD, self._get_states(readings))

    def predict_heads(self, questions: Sequence[Question], readings: Sequence[Reading]) -> HeadProbabilities:
        """Return the calibrated probabilities of all four classifiers (heads): intent, knowledge, time and self."""
        self_probabilities = np.array(self.calibrate(self.raw_scores(questions, readings)))  # of the head 'self'
        calibrations = self.artifact.options["calibrations"]
        return apply_heads(self.artifact.tensors, calibrations, self._get_states(readings), self_probabilities)

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Compute the need for retrieval with a decision tree over the four heads."""
        if not questions:
            return []
        apply_tree = apply_hard_tree if self.artifact.options["tree"] == "hard" else apply_soft_tree
        needs = apply_tree(self.predict_heads(questions, readings))
        return [float(need) for need in np.clip(needs, 0.0, 1.0)]

    def score_with_raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> GateScores:
        """Return the needs for retrieval from the decision tree, and the raw scores of the head 'self'."""
        return GateScores(self.score(questions, readings), self.raw_scores(questions, readings))

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """List the probabilities of all four heads for each question."""
        if not questions:
            return []
        heads = self.predict_heads(questions, readings)
        return [
            f"asks for sources {heads.intent[row]:.2f}, needs knowledge {heads.knowledge[row]:.2f}, "
            f"time-sensitive {heads.time[row]:.2f}, unknown {heads.self_[row]:.2f}"
            for row in range(len(questions))
        ]

    def _get_states(self, readings: Sequence[Reading]) -> Vector:
        """Return the hidden states before the answer, one row per question."""
        return stack_hidden_states(readings, self.artifact.options["layer"], "pre")


def _require_scales(tensors: networks.TensorValidator, state_size: int) -> None:
    """Check the tensors for standardizing hidden states. Older folders have a single number 'size' instead."""
    if "size" in tensors:
        tensors.require("size", 1, positive=True)
        return
    for name in (SELF_HEAD, *CRITERIA):
        tensors.require(f"{name}.mean", state_size)
        tensors.require(f"{name}.scale", state_size, positive=True)


def apply_heads(
    tensors: Tensors, calibrations: Sequence[Mapping[str, Any]], states: Vector, self_probabilities: FloatArray
) -> HeadProbabilities:
    """Compute the probabilities of three heads (classifiers) of UAR, and add those of the fourth head, 'self'.

    Args:
        tensors: Weights of the heads.
        calibrations: Calibrations of the heads intent, knowledge and time, in this order.
        states: Hidden states, one row per question.
        self_probabilities: How probably the LLM does not know each answer: the calibrated results of the head 'self'.
    """
    probabilities = {}
    for name, calibration in zip(CRITERIA, calibrations, strict=True):
        probabilities[name] = networks.apply_calibration(apply_head(tensors, name, states), calibration)
    return HeadProbabilities(**probabilities, self_=self_probabilities)


def apply_hard_tree(heads: HeadProbabilities) -> FloatArray:
    """Compute the need for retrieval with the decision tree of the UAR paper.

    The tree asks in this order: does the user ask for sources (intent)? Is knowledge needed? Does the answer change
    with time? Does the LLM not know the answer (self)?
    """
    retrieve, skip = 1.0, 0.0
    conditions = [heads.intent > 0.5, heads.knowledge <= 0.5, heads.time > 0.5]  # the first that is met decides
    return np.select(conditions, [retrieve, skip, retrieve], default=heads.self_)


def apply_soft_tree(heads: HeadProbabilities) -> FloatArray:
    """Compute the probability of reaching "retrieve" in the UAR decision tree.

    The tree retrieves if the user asks for sources (intent). It also retrieves if knowledge is needed, and the answer
    changes with time or the LLM does not know it (self). Each of the four classifiers gives the probability of its
    branch.
    """
    changing_or_unknown = heads.time + (1 - heads.time) * heads.self_
    return heads.intent + (1 - heads.intent) * heads.knowledge * changing_or_unknown


def apply_head(tensors: Tensors, name: str, states: Vector) -> FloatArray:
    """Compute the probability predicted by one head: sigmoid(w . (state - mean) / scale).

    Older heads have no mean. They divide all states by one number ('size') instead.
    """
    weight = tensors[f"{name}.weight"].astype(np.float64)
    networks.check_feature_width(states, len(weight))
    if f"{name}.mean" in tensors:
        inputs = (states.astype(np.float64) - tensors[f"{name}.mean"]) / tensors[f"{name}.scale"]
    else:
        inputs = states.astype(np.float64) / float(tensors["size"][0])
    return sigmoid(inputs @ weight)
