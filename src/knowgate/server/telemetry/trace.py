"""What became of one request: decision, passages, failures, what each stage took; as JSON and as headers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.datastructures import Headers

from knowgate.pipeline.answer_json import decision_record
from knowgate.server.auth.api_keys import ApiKey
from knowgate.types import ArbiterChoice, Completion, Decision, Passage

HEADER_PREFIX = "x-knowgate-"
MAX_HEADER_CHARS = 300  # characters of a reason in a header


def _new_id() -> str:
    return f"kg-{secrets.token_hex(12)}"


@dataclass(frozen=True)
class ClientRequest:
    """A request: its body and headers. path: where it goes at the upstream."""

    body: Mapping[str, Any]
    headers: Headers
    path: str = "/chat/completions"


class StageTiming(NamedTuple):
    """A stage of a request. begun: of `time.perf_counter`."""

    name: str
    begun: float
    seconds: float


@dataclass
class RequestTrace:
    """way: in-process, draft, race, question or pass-through. ungated: why nothing was decided.

    question: what was asked, as it was understood; never part of the record.
    arm, mode: which of the server's gates decided, and why it is not obeyed (shadow, canary, alarm), if it is not.
    asked, draft: the request as it came and what the LLM said from memory, for whoever learns from them.
    key: whose request it is, where there are keys. model: the LLM that answers.
    choice: what the arbiter did, where it was asked. unweighed: why it was not, where there is one and a draft.
    ignored: fields of the request that mean nothing to a model in this process.
    """

    way: str = "pass-through"
    id: str = field(default_factory=_new_id)
    decision: Decision | None = None
    passages: tuple[Passage, ...] = ()
    degraded: list[str] = field(default_factory=list)
    ungated: str = ""
    question: str | None = None
    arm: str = ""
    mode: str = ""
    asked: ClientRequest | None = None
    draft: Completion | None = None
    choice: ArbiterChoice | None = None
    unweighed: str = ""
    key: ApiKey | None = None
    model: str = ""
    ignored: tuple[str, ...] = ()
    milliseconds: dict[str, float] = field(default_factory=dict)
    stages: list[StageTiming] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add_time(stage, time.perf_counter() - start, start)

    def add_time(self, stage: str, seconds: float, begun: float | None = None) -> None:
        """begun: where it is known; else it came after the stage before."""
        last = self.stages[-1] if self.stages else StageTiming("", self.begun, 0.0)
        begun = last.begun + last.seconds if begun is None else begun
        if last.name == stage:  # it goes on: a reply was sent for, then read
            self.stages[-1] = StageTiming(stage, last.begun, begun + seconds - last.begun)
        else:
            self.stages.append(StageTiming(stage, begun, seconds))
        self.milliseconds[stage] = round(self.milliseconds.get(stage, 0.0) + 1000 * seconds, 3)

    @property
    def record(self) -> dict[str, Any]:
        """The `knowgate` object of a reply, as far as things are known now."""
        decided = {} if self.decision is None else decision_record(self.decision)
        return {
            "id": self.id,
            "way": self.way,
            "gated": self.decision is not None,
            **decided,
            **({"why_not": self.ungated} if self.ungated else {}),
            **({"arm": self.arm} if self.arm else {}),
            **({"mode": self.mode} if self.mode else {}),
            "passages": [{"id": one.id, "title": one.title, "score": one.score} for one in self.passages],
            **self._chosen,
            "degraded": list(self.degraded),
            **({"ignored": list(self.ignored)} if self.ignored else {}),
            "milliseconds": {**self.milliseconds, "total": round(1000 * (time.perf_counter() - self.begun), 3)},
        }

    @property
    def _chosen(self) -> dict[str, Any]:
        chosen = self.choice
        if chosen is None:
            return {"unweighed": self.unweighed} if self.unweighed else {}
        given = "draft" if chosen.is_closed_book else "passages"
        return {"choice": {"given": given, "arbiter": chosen.arbiter, "reason": chosen.reason}}

    @property
    def headers(self) -> dict[str, str]:
        found = {"id": self.id, "way": self.way, "degraded": "; ".join(self.degraded), "reason": self.ungated}
        found |= {"arm": self.arm, "mode": self.mode}
        if self.decision is not None:
            found |= {
                "retrieve": "true" if self.decision.retrieve else "false",
                "need": f"{self.decision.need:.4f}",
                "threshold": f"{self.decision.threshold:g}",
                "gate": self.decision.gate,
                "reason": self.decision.reason,
                "passages": str(len(self.passages)),
            }
        found["ms"] = ", ".join(f"{stage}={value:.1f}" for stage, value in self.milliseconds.items())
        return {HEADER_PREFIX + name: _plain(value) for name, value in found.items() if value}


def _plain(text: str) -> str:
    """Headers hold printable ASCII; a line break would begin another one."""
    text = text[:MAX_HEADER_CHARS]
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if " " <= char <= "~" else "?" for char in text)
