"""A/B tests of gates.

An experiment has one or two arms. Each arm is a gate with a monitor that measures how many answers are lost if this gate
skips retrieval. All requests of the same user (the field `user` of a request) get the same arm. Requests without a user
are assigned at random. A request that selects a gate itself takes no part in the experiment. One that names the gate of the
server gets arm "a"; with two gates, it is not counted. A request that changes only the threshold, filter or maximum loss is
assigned to an arm, but not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from knowgate.data.splits import hash_to_unit
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.server.chat.request_options import RequestOptions
from knowgate.server.learning.loss_monitor import LossMonitor
from knowgate.server.telemetry.trace import RequestTrace

SHADOW_REASON = "shadow mode always retrieves"
CANARY_REASON = "only a share of requests (canary) follows the gate, and this request does not belong to it"


@dataclass
class ExperimentArm:
    """One gate (arm) of an A/B test. Without an A/B test, there is only arm "a".

    Attributes:
        name: "a" or "b".
        rag: The pipeline with this gate.
        monitor: Measures how many answers change because the gate skips retrieval, and raises an alarm.
        scope: Hash of everything that the loss depends on, such as gate, arbiter, LLM and index. Stored audits with
            another scope are not counted.
        gate_spec: The gate as the user names it, such as 'logprob:first'.
    """

    name: str
    rag: AdaptiveRAG
    monitor: LossMonitor
    scope: str
    gate_spec: str = ""
    _shadow_pipelines: dict[str, AdaptiveRAG] = field(default_factory=dict)

    def get_pipeline(self, shadow: str) -> AdaptiveRAG:
        """Return the pipeline of this arm. In shadow mode, it always retrieves.

        Shadow pipelines are cached, because only requests with the same pipeline object can be answered in one batch.

        Args:
            shadow: The reason for shadow mode, such as that the gate is only tried out, or "" to follow the gate.
        """
        if not shadow:
            return self.rag
        if shadow not in self._shadow_pipelines:
            if len(self._shadow_pipelines) > 2:  # the reason of an alarm contains numbers, so it changes often
                self._shadow_pipelines.clear()
            self._shadow_pipelines[shadow] = self.rag.replace(shadow=shadow)
        return self._shadow_pipelines[shadow]


@dataclass
class Experiment:
    """A/B test that assigns each request to an arm (one of two gates). With one gate, all requests get arm "a".

    Attributes:
        arms: The arms by name. There is always "a", and in an A/B test also "b".
        share_b: Share of requests that get arm "b".
        canary: Share of requests that follow the decision of the gate. All others retrieve. 0 is shadow mode.
    """

    arms: Mapping[str, ExperimentArm]
    share_b: float = 0.0
    canary: float = 1.0

    def assign(self, options: RequestOptions, body: Mapping[str, Any], trace: RequestTrace) -> RequestOptions:
        """Choose the gate (arm "a" or "b") of a request. Also choose whether the server follows this gate.

        Args:
            options: Options of the request. If they select a gate, they are returned unchanged. `arm` is "a" if the
                request names the gate of the server.
            body: Body of the request. All requests with the same field `user` get the same arm.
            trace: Record of the request. Its `arm` and `mode` are set.

        Returns:
            The options with `arm`, and with `shadow`: the reason to retrieve regardless of the gate, or "".
        """
        if options.gate_name:
            return options
        user = body.get("user") or trace.id
        name = options.arm or ("b" if hash_to_unit("arm", user) < self.share_b else "a")
        # A request with another threshold, filter or maximum loss says nothing about the arm, so it is not counted. Requests
        # that name the gate of the server are not a random sample, which a comparison of two gates needs.
        is_sample = not (options.arm and len(self.arms) > 1)
        trace.arm = name if options.is_default and is_sample else ""
        trace.gate_spec = self.arms[name].gate_spec
        trace.mode, shadow = self._choose_mode(self.arms[name], user, trace.owner)
        if trace.mode == "alarm":
            trace.degraded.append("alarm")
        return replace(options, arm=name, shadow=shadow)

    def _choose_mode(self, arm: ExperimentArm, user: str, api_key_name: str) -> tuple[str, str]:
        """Choose whether the server follows the gate for a request, or always retrieves.

        Args:
            arm: The gate, with the monitor of its losses.
            user: The user, or the id of a request without a user. All requests of a user are treated alike.
            api_key_name: Name of the API key. An alarm may concern one key only.

        Returns:
            A mode and its reason. Both are "" if the server follows the gate. In the other modes, it retrieves: "alarm"
            (the gate changes too many answers), "shadow" (all requests retrieve), "canary" (all but a share retrieve).
        """
        if alarm := arm.monitor.get_alarm(api_key_name):
            return "alarm", f"the alarm is on ({alarm})"
        if not self.canary:
            return "shadow", SHADOW_REASON
        is_canary = hash_to_unit("canary", user) < self.canary
        return ("", "") if is_canary else ("canary", CANARY_REASON)
