"""A/B tests of gates.

An experiment has one or two arms. Each arm is a gate with a monitor that measures how many answers are lost if this gate
skips retrieval. All requests of the same user (the field `user` of a request) get the same arm. Requests without a user
are assigned at random. A request that selects a gate itself takes no part in the experiment. A request that changes only
the threshold, filter or maximum loss is assigned to an arm, but not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from knowgate.data.splits import hash_to_unit
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.server.chat.request_options import RequestOptions
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.stats.confidence_sequences import GuaranteeTest, MeanConfidenceSequence

FAR_DISTANCE = 1.0 + 1e-6  # distance from the training data that only 1 % of the training questions exceed
MAX_FAR_SHARE = 0.05  # if a larger share of questions exceeds this distance, the questions have drifted
SHADOW_REASON = "shadow mode always retrieves"
CANARY_REASON = "only a share of requests (canary) follows the gate, and this request does not belong to it"


@dataclass
class LossMonitor:
    """Measures, for one gate, how many answers skipping retrieval loses, and how unusual the questions are.

    A random sample of requests is audited. A request that retrieved counts as 0. A request that skipped retrieval is
    also answered with passages, and counts as 1 (a lost answer) if the two answers differ. The mean is the share of
    answers that would be different if the server always retrieved. The share that became wrong cannot be larger.

    Args:
        guaranteed_loss: Maximum share of answers that skipping may lose. None means that there is no guarantee, and
            therefore no alarm.
        delta: Probability that a bound is ever wrong, or that there is ever a false alarm.
    """

    guaranteed_loss: float | None = None
    delta: float = 0.05
    loss: MeanConfidenceSequence = field(init=False)
    loss_test: GuaranteeTest | None = field(init=False)
    far: MeanConfidenceSequence = field(init=False)
    drift_test: GuaranteeTest = field(init=False)

    def __post_init__(self) -> None:
        self.reset_loss()
        self.far, self.drift_test = MeanConfidenceSequence(self.delta), GuaranteeTest(MAX_FAR_SHARE, self.delta)

    def reset_loss(self) -> None:
        """Discard the results of all audits, and clear the alarm."""
        self.loss = MeanConfidenceSequence(self.delta)
        self.loss_test = None if self.guaranteed_loss is None else GuaranteeTest(self.guaranteed_loss, self.delta)

    def add_audit(self, lost: float) -> None:
        """Add the result of an audit, which is 1 if skipping retrieval lost the answer, otherwise 0."""
        self.loss.add(lost)
        if self.loss_test is not None:
            self.loss_test.add(lost)

    def add_distance(self, distance: float | None) -> None:
        """Count whether a question is far from the training questions of the gate.

        Args:
            distance: Distance of the question. If the gate does not compute it (None), the question is not counted.
        """
        if distance is not None:
            self.far.add(float(distance > FAR_DISTANCE))
            self.drift_test.add(float(distance > FAR_DISTANCE))

    @property
    def alarm(self) -> str:
        """Reason why the server must always retrieve, or "" while the guaranteed loss is not exceeded."""
        if self.loss_test is None or not self.loss_test.is_violated or self.guaranteed_loss is None:
            return ""
        confidence = f"{100 * (1 - self.delta):g} % confidence"
        return f"more than {100 * self.guaranteed_loss:.3g} % of the answers are lost by skipping, with {confidence}"

    def to_json(self) -> dict[str, Any]:
        """Return the measured loss and drift, as in `LossReport` and `DriftReport`."""
        loss = {
            "drawn": self.loss.n,
            "lost": self.loss.total,
            **_bounds_to_json(self.loss),
            "promised": self.guaranteed_loss,
            "confidence": 1 - self.delta,
            "evidence": self.loss_test.evidence_share if self.loss_test else None,
            "alarm": self.alarm,
        }
        drift = {"questions": self.far.n, **_bounds_to_json(self.far), "drifted": self.drift_test.is_violated}
        return {"loss": loss, "drift": drift}


def _bounds_to_json(sequence: MeanConfidenceSequence) -> dict[str, float | None]:
    return {"mean": sequence.mean, "low": sequence.low, "high": sequence.high}


@dataclass
class ExperimentArm:
    """One arm of an A/B test: a gate with its loss monitor.

    Attributes:
        name: "a" or "b".
        rag: The pipeline with this gate.
        monitor: Measures the loss of the gate.
        scope: Hash of everything that the loss depends on, such as gate, LLM and index. Stored audits with another
            scope are not counted.
    """

    name: str
    rag: AdaptiveRAG
    monitor: LossMonitor
    scope: str
    _shadow_pipelines: dict[str, AdaptiveRAG] = field(default_factory=dict)

    @property
    def threshold(self) -> float:
        """Threshold of the pipeline, which defaults to that of its gate."""
        return self.rag.gate.threshold if self.rag.threshold is None else self.rag.threshold

    def get_pipeline(self, shadow: str) -> AdaptiveRAG:
        """Return the pipeline of this arm.

        Args:
            shadow: Reason to always retrieve, or "" to follow the gate. The same reason returns the same pipeline
                object, because only requests with the same pipeline can share a batch.
        """
        if not shadow:
            return self.rag
        if shadow not in self._shadow_pipelines:
            if (
                len(self._shadow_pipelines) > 2
            ):  # the text of an alarm changes, so old pipelines are not needed any more
                self._shadow_pipelines.clear()
            self._shadow_pipelines[shadow] = self.rag.replace(shadow=shadow)
        return self._shadow_pipelines[shadow]


@dataclass
class Experiment:
    """Assigns requests to the arms of an A/B test, or to the only arm if there is no second gate.

    Attributes:
        arms: The arms by name. There is always "a", and in an A/B test also "b".
        share_b: Share of requests that get arm "b".
        canary: Share of requests that follow the decision of the gate. All others retrieve. 0 is shadow mode.
    """

    arms: Mapping[str, ExperimentArm]
    share_b: float = 0.0
    canary: float = 1.0

    def assign(self, options: RequestOptions, body: Mapping[str, Any], trace: RequestTrace) -> RequestOptions:
        """Choose the arm of a request, and whether the decision of its gate is followed.

        Args:
            options: Options of the request. If they select a gate, they are returned unchanged.
            body: Body of the request. Its field `user`, if any, determines the arm.
            trace: Trace of the request, in which arm and mode are stored.

        Returns:
            The options with `arm` and `shadow`.
        """
        if options.gate_name:
            return options
        user = body.get("user")
        key = user if isinstance(user, str) and user else trace.id
        name = "b" if hash_to_unit("arm", key) < self.share_b else "a"
        trace.arm = name if options.is_default else ""
        trace.mode, shadow = self._choose_mode(self.arms[name], key)
        if trace.mode == "alarm":
            trace.degraded.append("alarm")
        return replace(options, arm=name, shadow=shadow)

    def _choose_mode(self, arm: ExperimentArm, key: str) -> tuple[str, str]:
        """Choose whether a request follows the gate.

        Returns:
            The mode and its reason, both "" if the gate is followed. Otherwise the mode is "alarm", "shadow" or
            "canary".
        """
        if arm.monitor.alarm:
            return "alarm", f"the alarm is on ({arm.monitor.alarm})"
        if not self.canary:
            return "shadow", SHADOW_REASON
        return ("", "") if hash_to_unit("canary", key) < self.canary else ("canary", CANARY_REASON)
