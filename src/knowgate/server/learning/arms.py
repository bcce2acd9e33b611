"""What is found out about one gate while it works: what skipping costs, whether a promise is broken, strange questions.

A share of the requests is drawn, whatever was decided on them. A drawn one that was looked up loses nothing. A drawn
one that was skipped is also answered with passages; it is lost where that is another answer. The mean of both is what
skipping costs of all answers, against always retrieving: no weights, and each number is between 0 and 1. By any gold
answer no more is lost, for who says the same is as right.

Distances say how far questions lie from those the gate was fitted on; one in a hundred is far there.
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

FAR_DISTANCE = 1.0 + 1e-6
MAX_FAR_SHARE = 0.05  # share of far questions that is still put up with: one in a hundred is by construction


@dataclass
class LossMonitor:
    """promised: the loss that was promised, None for none; then there is no alarm. delta: of all that is said here."""

    promised: float | None = None
    delta: float = 0.05
    loss: MeanConfidenceSequence = field(init=False)
    test: GuaranteeTest | None = field(init=False)
    far: MeanConfidenceSequence = field(init=False)
    strange: GuaranteeTest = field(init=False)

    def __post_init__(self) -> None:
        self.begin_again()
        self.far, self.strange = MeanConfidenceSequence(self.delta), GuaranteeTest(MAX_FAR_SHARE, self.delta)

    def begin_again(self) -> None:
        """Forget what was lost, and with it an alarm."""
        self.loss = MeanConfidenceSequence(self.delta)
        self.test = None if self.promised is None else GuaranteeTest(self.promised, self.delta)

    def see_loss(self, lost: float) -> None:
        self.loss.add(lost)
        if self.test is not None:
            self.test.add(lost)

    def see_distance(self, distance: float | None) -> None:
        if distance is not None:
            self.far.add(float(distance > FAR_DISTANCE))
            self.strange.add(float(distance > FAR_DISTANCE))

    @property
    def alarm(self) -> str:
        """Why everything must be looked up; '' where it need not."""
        if self.test is None or not self.test.is_violated or self.promised is None:
            return ""
        sure = f"{100 * (1 - self.delta):g} % sure"
        return f"more than {100 * self.promised:.3g} % of the answers are lost by skipping, {sure}"

    @property
    def record(self) -> dict[str, Any]:
        """As JSON: for the dashboard and `GET /v1/learning`."""
        promise = {
            "promised": self.promised,
            "confidence": 1 - self.delta,
            "evidence": self.test.evidence_share if self.test else None,
            "alarm": self.alarm,
        }
        loss = {"drawn": self.loss.n, "lost": self.loss.total, **_bounds(self.loss), **promise}
        drift = {"questions": self.far.n, **_bounds(self.far), "drifted": self.strange.is_violated}
        return {"loss": loss, "drift": drift}


def _bounds(bounds: MeanConfidenceSequence) -> dict[str, float | None]:
    return {"mean": bounds.mean, "low": bounds.low, "high": bounds.high}


SHADOW_REASON = "in shadow mode everything is looked up"
CANARY_REASON = "the gate is obeyed for a share of the requests only, not for this one"


@dataclass
class ExperimentArm:
    """A gate with what is found out about it. scope: names all that this depends on."""

    name: str
    rag: AdaptiveRAG
    watch: LossMonitor
    scope: str
    made: dict[str, AdaptiveRAG] = field(default_factory=dict)

    @property
    def threshold(self) -> float:
        return self.rag.gate.threshold if self.rag.threshold is None else self.rag.threshold

    def pipeline(self, shadow: str) -> AdaptiveRAG:
        """The same one for the same words, so that requests can go together."""
        if shadow not in self.made:
            self.made = {key: value for key, value in self.made.items() if key in (SHADOW_REASON, CANARY_REASON)}
            self.made[shadow] = self.rag.replace(shadow=shadow)
        return self.made[shadow] if shadow else self.rag


@dataclass
class Experiment:
    """share_b: of the requests that the second arm gets. canary: share for which gates are obeyed; 0 is shadow mode."""

    arms: Mapping[str, ExperimentArm]
    share_b: float = 0.0
    canary: float = 1.0

    def assign(self, policy: RequestOptions, body: Mapping[str, Any], trace: RequestTrace) -> RequestOptions:
        if policy.chosen:
            return policy
        user = body.get("user")
        key = user if isinstance(user, str) and user else trace.id
        name = "b" if hash_to_unit("arm", key) < self.share_b else "a"
        trace.arm = name if policy.is_ours else ""
        trace.mode, shadow = self._mode(self.arms[name], key)
        if trace.mode == "alarm":
            trace.degraded.append("alarm")
        return replace(policy, arm=name, shadow=shadow)

    def _mode(self, arm: ExperimentArm, key: str) -> tuple[str, str]:
        if arm.watch.alarm:
            return "alarm", f"the alarm is on ({arm.watch.alarm})"
        if not self.canary:
            return "shadow", SHADOW_REASON
        return ("", "") if hash_to_unit("canary", key) < self.canary else ("canary", CANARY_REASON)

    def pipeline(self, arm: str, shadow: str) -> AdaptiveRAG:
        return self.arms[arm].pipeline(shadow)
