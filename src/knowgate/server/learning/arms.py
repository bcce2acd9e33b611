"""A/B tests of gates: which gate decides on a request, whether it is followed, and what skipping costs.

Each arm of an experiment is a gate with a loss monitor. The same user (the field `user` of a request) always gets the
same arm; requests without a user are assigned at random. A request that selects a gate itself takes no part in the
experiment; one that only changes the threshold, filter or loss follows it but is not counted.
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

FAR_DISTANCE = 1.0 + 1e-6  # 1 % of the training questions are farther away
MAX_FAR_SHARE = 0.05  # a larger share of far questions is drift
SHADOW_REASON = "shadow mode always retrieves"
CANARY_REASON = "this request is not part of the canary share that follows the gate"


@dataclass
class LossMonitor:
    """Monitors one gate: the share of answers that skipping loses, and drift of the questions.

    A random sample of requests is audited, whatever was decided. One that retrieved loses nothing. One that skipped is
    also answered with passages, and counts as lost if the answers differ. The mean over both is the share of answers
    that skipping changes compared to always retrieving; no more than that can become wrong.

    Args:
        guaranteed_loss: The share of answers that skipping may lose; None: there is no guarantee and no alarm.
        delta: Probability that any bound or alarm is wrong at any time.
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
        """Discard all audits, and clear the alarm."""
        self.loss = MeanConfidenceSequence(self.delta)
        self.loss_test = None if self.guaranteed_loss is None else GuaranteeTest(self.guaranteed_loss, self.delta)

    def add_audit(self, lost: float) -> None:
        """Add the result of an audit: 1 if skipping lost the answer, else 0."""
        self.loss.add(lost)
        if self.loss_test is not None:
            self.loss_test.add(lost)

    def add_distance(self, distance: float | None) -> None:
        """Count how far a question is from the training data; None if the gate cannot tell."""
        if distance is not None:
            self.far.add(float(distance > FAR_DISTANCE))
            self.drift_test.add(float(distance > FAR_DISTANCE))

    @property
    def alarm(self) -> str:
        """Why the server must always retrieve; "" while the guarantee holds."""
        if self.loss_test is None or not self.loss_test.is_violated or self.guaranteed_loss is None:
            return ""
        confidence = f"{100 * (1 - self.delta):g} % confidence"
        return f"more than {100 * self.guaranteed_loss:.3g} % of the answers are lost by skipping, with {confidence}"

    def to_json(self) -> dict[str, Any]:
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
    """A gate with its loss monitor.

    Attributes:
        name: "a" or "b".
        rag: The pipeline with this gate.
        monitor: What is known about the gate from traffic.
        scope: Hash of everything that the loss depends on; audits of other scopes do not count.
    """

    name: str
    rag: AdaptiveRAG
    monitor: LossMonitor
    scope: str
    _shadow_pipelines: dict[str, AdaptiveRAG] = field(default_factory=dict)

    @property
    def threshold(self) -> float:
        return self.rag.gate.threshold if self.rag.threshold is None else self.rag.threshold

    def get_pipeline(self, shadow: str) -> AdaptiveRAG:
        """Return the pipeline; with a reason in `shadow`, one that always retrieves.

        The same reason returns the same pipeline, so that requests can be batched.
        """
        if not shadow:
            return self.rag
        if shadow not in self._shadow_pipelines:
            if len(self._shadow_pipelines) > 2:  # the reason of an alarm changes from time to time
                self._shadow_pipelines.clear()
            self._shadow_pipelines[shadow] = self.rag.replace(shadow=shadow)
        return self._shadow_pipelines[shadow]


@dataclass
class Experiment:
    """Assigns requests to arms.

    Attributes:
        arms: The arms by name: "a", and in an A/B test "b".
        share_b: Share of requests that arm "b" decides.
        canary: Share of requests that follow the gate; 0 is shadow mode.
    """

    arms: Mapping[str, ExperimentArm]
    share_b: float = 0.0
    canary: float = 1.0

    def assign(self, options: RequestOptions, body: Mapping[str, Any], trace: RequestTrace) -> RequestOptions:
        """Return the options with the arm of the request and whether its gate is followed."""
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
        """Return the mode ("" if the gate is followed) and the reason for it."""
        if arm.monitor.alarm:
            return "alarm", f"the alarm is on ({arm.monitor.alarm})"
        if not self.canary:
            return "shadow", SHADOW_REASON
        return ("", "") if hash_to_unit("canary", key) < self.canary else ("canary", CANARY_REASON)
