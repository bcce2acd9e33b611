"""What happened to one request: decision, passages, failures and timings, as JSON and as response headers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.datastructures import Headers

from knowgate.pipeline.answer_json import decision_record
from knowgate.types import ArbiterChoice, Completion, Decision, Passage

HEADER_PREFIX = "x-knowgate-"
MAX_HEADER_CHARS = 300


def _create_request_id() -> str:
    return f"kg-{secrets.token_hex(12)}"


@dataclass(frozen=True)
class ClientRequest:
    """A request as the client sent it. `path` is its path at the upstream."""

    body: Mapping[str, Any]
    headers: Headers
    path: str = "/chat/completions"


class StageTiming(NamedTuple):
    """A stage of a request. `start` is a time of `time.perf_counter`."""

    name: str
    start: float
    seconds: float


@dataclass
class RequestTrace:
    """Collects what happens to one request while it is processed.

    Attributes:
        way: How the request is answered: "in-process", "draft", "race", "question" or "pass-through".
        id: Identifier of the request and of its decision.
        decision: The decision of the gate, if one was made.
        passages: Passages that the LLM was given.
        degraded: Components that failed or were bypassed, such as "gate" or "retriever".
        ungated_reason: Why no decision was made.
        question: The question that was decided on. Never part of the JSON.
        arm: Arm of the experiment that decided.
        mode: Why the decision was not followed: "shadow", "canary" or "alarm".
        client_request: The original request, for audits.
        draft: The closed-book answer that the gate read.
        choice: What the arbiter chose.
        arbitration_gap: Why the arbiter was not used although there is a draft.
        model_name: The LLM that answers.
        ignored_fields: Request fields that have no effect on a model in this process.
    """

    way: str = "pass-through"
    id: str = field(default_factory=_create_request_id)
    decision: Decision | None = None
    passages: tuple[Passage, ...] = ()
    degraded: list[str] = field(default_factory=list)
    ungated_reason: str = ""
    question: str | None = None
    arm: str = ""
    mode: str = ""
    client_request: ClientRequest | None = None
    draft: Completion | None = None
    choice: ArbiterChoice | None = None
    arbitration_gap: str = ""
    model_name: str = ""
    ignored_fields: tuple[str, ...] = ()
    milliseconds: dict[str, float] = field(default_factory=dict)
    stages: list[StageTiming] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Measure the time of the body as a stage of the request."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add_time(stage, time.perf_counter() - start, start)

    def add_time(self, stage: str, seconds: float, start: float | None = None) -> None:
        """Add the time of a stage. Without `start`, it began when the previous stage ended."""
        last = self.stages[-1] if self.stages else StageTiming("", self.start, 0.0)
        start = last.start + last.seconds if start is None else start
        if last.name == stage:  # the stage continues, for example with reading the body of a response
            self.stages[-1] = StageTiming(stage, last.start, start + seconds - last.start)
        else:
            self.stages.append(StageTiming(stage, start, seconds))
        self.milliseconds[stage] = round(self.milliseconds.get(stage, 0.0) + 1000 * seconds, 3)

    def to_json(self) -> dict[str, Any]:
        """Return the `knowgate` object of a response, with everything that is known so far."""
        return {
            "id": self.id,
            "way": self.way,
            "gated": self.decision is not None,
            **({} if self.decision is None else decision_record(self.decision)),
            **({"why_not": self.ungated_reason} if self.ungated_reason else {}),
            **({"arm": self.arm} if self.arm else {}),
            **({"mode": self.mode} if self.mode else {}),
            "passages": [{"id": hit.id, "title": hit.title, "score": hit.score} for hit in self.passages],
            **self._choice_json(),
            "degraded": list(self.degraded),
            **({"ignored": list(self.ignored_fields)} if self.ignored_fields else {}),
            "milliseconds": {**self.milliseconds, "total": round(1000 * (time.perf_counter() - self.start), 3)},
        }

    def _choice_json(self) -> dict[str, Any]:
        """Return the arbiter's choice, or why there was none."""
        if self.choice is None:
            return {"unweighed": self.arbitration_gap} if self.arbitration_gap else {}
        source = "draft" if self.choice.is_closed_book else "passages"
        return {"choice": {"given": source, "arbiter": self.choice.arbiter, "reason": self.choice.reason}}

    @property
    def headers(self) -> dict[str, str]:
        """The same information as `to_json`, in short, as response headers."""
        values = {"id": self.id, "way": self.way, "degraded": "; ".join(self.degraded), "reason": self.ungated_reason}
        values |= {"arm": self.arm, "mode": self.mode}
        if self.decision is not None:
            values |= {
                "retrieve": "true" if self.decision.retrieve else "false",
                "need": f"{self.decision.need:.4f}",
                "threshold": f"{self.decision.threshold:g}",
                "gate": self.decision.gate,
                "reason": self.decision.reason,
                "passages": str(len(self.passages)),
            }
        values["ms"] = ", ".join(f"{stage}={value:.1f}" for stage, value in self.milliseconds.items())
        return {HEADER_PREFIX + name: _to_header_value(value) for name, value in values.items() if value}


def _to_header_value(text: str) -> str:
    """Shorten a text and replace everything that is not printable ASCII, which would allow header injection."""
    text = text[:MAX_HEADER_CHARS]
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if " " <= char <= "~" else "?" for char in text)
