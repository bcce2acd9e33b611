"""CBDR's probe: what the middle of the network knows about knowing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from knowgate.core.schema import read_record
from knowgate.data.signals.vectors import stack_hidden_states
from knowgate.gates.artifacts.gate_folder import Tensors
from knowgate.gates.artifacts.gate_manifest import CalibrationRecord, StatePosition, check_calibration
from knowgate.gates.artifacts.networks import (
    Floats,
    TensorValidator,
    apply_calibration,
    apply_network,
    check_feature_width,
    claim_network,
)
from knowgate.gates.fitted_gate import FittedGate
from knowgate.stats.logistic import sigmoid
from knowgate.types import GateScores, Question, Reading, Vector


@dataclass(frozen=True)
class ProbeOptions:
    layer: int
    position: StatePosition
    kind: Literal["mlp", "linear"] = "mlp"


@dataclass(frozen=True)
class ProbeGate(FittedGate):
    """need = a small network's reading of one hidden state, before the answer or after the draft.

    Needs: hidden. Cost per question: less than 1 % of the pass; before the answer, a retrieved question pays half a
    prefill and nothing else.
    Reference: Jin et al. (CBDR), section 3.1.
    Example:
        >>> gate = ProbeGate.load("my-probe")  # doctest: +SKIP
    """

    def check(self, tensors: TensorValidator) -> None:
        read_record(ProbeOptions, self.artifact.options, "options", ignore_unknown=True)
        claim_network(tensors)
        tensors.finish()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        options = self.artifact.options
        return apply_network(
            self.artifact.tensors, stack_hidden_states(readings, options["layer"], options["position"])
        )


CRITERIA = ("intent", "knowledge", "time")  # asks for sources? needs knowledge? changes with time?
SELF_HEAD = "self"  # is it unknown to the model?


@dataclass(frozen=True)
class HeadProbabilities:
    """Probability that each head says retrieve, one per question. `self_` is that of not knowing."""

    intent: Floats
    knowledge: Floats
    time: Floats
    self_: Floats


@dataclass(frozen=True)
class UarOptions:
    """One calibration for each of `CRITERIA`."""

    layer: int
    tree: Literal["soft", "hard"]
    calibrations: tuple[CalibrationRecord, CalibrationRecord, CalibrationRecord]


@dataclass(frozen=True)
class UarGate(FittedGate):
    """need = the decision tree intent -> knowledge -> time -> self over four linear heads.

    tree `hard` is the paper's: who asks for sources gets need 1, what takes no knowledge 0, what changes with time 1,
    all else the probability of not knowing. `soft`, the default, is the probability of coming out at "retrieve" when
    every node is passed with its head's probability: the same where the heads are sure, graded and monotone in each
    head between, so that one threshold moves all of it. The first three heads are calibrated on held-out labelled
    questions, the last on the label run.

    Needs: hidden. Cost per question: less than 1 % of the pass; a retrieved question pays one prefill.
    Reference: Cheng et al. 2024 (UAR); its heads are trained otherwise here, see `knowgate.training.uar`.
    Example:
        >>> gate = UarGate.load("my-uar")  # doctest: +SKIP
    """

    def check(self, tensors: TensorValidator) -> None:
        options = read_record(UarOptions, self.artifact.options, "options", ignore_unknown=True)
        for calibration in options.calibrations:
            check_calibration(calibration, "options")
        (width,) = tensors.claim(f"{SELF_HEAD}.weight", None).shape
        for name in CRITERIA:
            tensors.claim(f"{name}.weight", width)
        _expect_scales(tensors, width)
        tensors.finish()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        """Of the last head alone: that is the one the label run can calibrate."""
        return apply_head(self.artifact.tensors, SELF_HEAD, self._states(readings))

    def heads(self, questions: Sequence[Question], readings: Sequence[Reading]) -> HeadProbabilities:
        own = np.array(self.calibrated(self.raw_scores(questions, readings)))
        return apply_heads(self.artifact.tensors, self.artifact.options["calibrations"], self._states(readings), own)

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        if not questions:
            return []
        follow = apply_hard_tree if self.artifact.options["tree"] == "hard" else apply_soft_tree
        return [float(need) for need in np.clip(follow(self.heads(questions, readings)), 0.0, 1.0)]

    def score_with_raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> GateScores:
        """The tree's need; raw is the last head's score, the only one a label run says anything about."""
        return GateScores(self.score(questions, readings), self.raw_scores(questions, readings))

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        if not questions:
            return []
        heads = self.heads(questions, readings)
        probabilities = zip(heads.intent, heads.knowledge, heads.time, heads.self_, strict=True)
        return [
            f"asks for sources {intent:.2f}, needs knowledge {knowledge:.2f}, "
            f"time-sensitive {time:.2f}, unknown {own:.2f}"
            for intent, knowledge, time, own in probabilities
        ]

    def _states(self, readings: Sequence[Reading]) -> Vector:
        return stack_hidden_states(readings, self.artifact.options["layer"], "pre")


def _expect_scales(tensors: TensorValidator, width: int) -> None:
    """Each head's mean and scale; in older folders the one number that all heads share."""
    if "size" in tensors:
        tensors.claim("size", 1, positive=True)
        return
    for name in (SELF_HEAD, *CRITERIA):
        tensors.claim(f"{name}.mean", width)
        tensors.claim(f"{name}.scale", width, positive=True)


def apply_heads(
    tensors: Tensors, calibrations: Sequence[Mapping[str, Any]], features: Vector, own: Floats
) -> HeadProbabilities:
    """All heads' probabilities; those of the last one are given, as they are calibrated elsewhere."""
    intent, knowledge, time = (
        apply_calibration(apply_head(tensors, name, features), calibration)
        for name, calibration in zip(CRITERIA, calibrations, strict=True)
    )
    return HeadProbabilities(intent, knowledge, time, own)


def apply_hard_tree(heads: HeadProbabilities) -> Floats:
    """The paper's decisions, each at 0.5."""
    known_in_time: Floats = np.where(heads.time > 0.5, 1.0, heads.self_)
    informed: Floats = np.where(heads.knowledge > 0.5, known_in_time, 0.0)
    need: Floats = np.where(heads.intent > 0.5, 1.0, informed)
    return need


def apply_soft_tree(heads: HeadProbabilities) -> Floats:
    """Probability of ending at "retrieve": i + (1 - i) k (t + (1 - t) s)."""
    looked_up = heads.time + (1 - heads.time) * heads.self_
    need: Floats = heads.intent + (1 - heads.intent) * heads.knowledge * looked_up
    return need


def apply_head(tensors: Tensors, name: str, features: Vector) -> Floats:
    """sigmoid(w . (state - mean) / scale), without a bias; mean and scale are those of the rows the head learnt from.

    Heads of older folders share one number instead, the root mean square of the states they were trained on.
    """
    check_feature_width(features, len(tensors[f"{name}.weight"]))
    states, weight = features.astype(np.float64), tensors[f"{name}.weight"].astype(np.float64)
    if f"{name}.mean" in tensors:
        states = (states - tensors[f"{name}.mean"]) / tensors[f"{name}.scale"]
    else:
        states = states / float(tensors["size"][0])
    probability: Floats = sigmoid(states @ weight)
    return probability
