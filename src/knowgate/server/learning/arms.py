"""Which gate decides on a request, and whether it is obeyed: two gates side by side, shadow mode, a canary, an alarm.

An arm is a gate with its own figures. The same user (the field `user` of a request) always meets the same arm; requests
that name none are spread by chance. A request with a wish of its own counts for no arm; one that names its gate is
left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from knowgate.pipeline import AdaptiveRAG
from knowgate.runs import hashed_share
from knowgate.server.learning.watch import Watch
from knowgate.server.policy import Policy
from knowgate.server.trace import Trace

SHADOW = "in shadow mode everything is looked up"
HELD_BACK = "the gate is obeyed for a share of the requests only, not for this one"


@dataclass
class Arm:
    """A gate with what is found out about it. scope: names all that this depends on."""

    name: str
    rag: AdaptiveRAG
    watch: Watch
    scope: str
    made: dict[str, AdaptiveRAG] = field(default_factory=dict)

    @property
    def threshold(self) -> float:
        return self.rag.gate.threshold if self.rag.threshold is None else self.rag.threshold

    def pipeline(self, shadow: str) -> AdaptiveRAG:
        """The same one for the same words, so that requests can go together."""
        if shadow not in self.made:
            self.made = {key: value for key, value in self.made.items() if key in (SHADOW, HELD_BACK)}
            self.made[shadow] = self.rag.altered(shadow=shadow)
        return self.made[shadow] if shadow else self.rag


@dataclass
class Arms:
    """share_b: of the requests that the second arm gets. canary: share for which gates are obeyed; 0 is shadow mode."""

    arms: Mapping[str, Arm]
    share_b: float = 0.0
    canary: float = 1.0

    def assign(self, policy: Policy, body: Mapping[str, Any], trace: Trace) -> Policy:
        if policy.chosen:
            return policy
        user = body.get("user")
        key = user if isinstance(user, str) and user else trace.id
        name = "b" if hashed_share("arm", key) < self.share_b else "a"
        trace.arm = name if policy.is_ours else ""
        trace.mode, shadow = self._mode(self.arms[name], key)
        if trace.mode == "alarm":
            trace.degraded.append("alarm")
        return replace(policy, arm=name, shadow=shadow)

    def _mode(self, arm: Arm, key: str) -> tuple[str, str]:
        if arm.watch.alarm:
            return "alarm", f"the alarm is on ({arm.watch.alarm})"
        if not self.canary:
            return "shadow", SHADOW
        return ("", "") if hashed_share("canary", key) < self.canary else ("canary", HELD_BACK)

    def pipeline(self, arm: str, shadow: str) -> AdaptiveRAG:
        return self.arms[arm].pipeline(shadow)
