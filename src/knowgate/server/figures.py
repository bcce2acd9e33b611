"""What the server did since it started: counts, needs, times, what skipping saved. No texts.

Saved is net: what a skipped request would have spent on passages, less what drafts cost that were not the reply. It is
taken at the mean of the requests that were looked up, so that nothing is known before the first of them.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from knowgate.server.options import ServeOptions
from knowgate.server.trace import Trace
from knowgate.text import estimate_tokens

BINS = 20
MINUTES = 60
LAST = 500  # times of a stage that are kept
TOLD = 100  # of them that other workers hear of
LOOKING_UP = ("retrieve", "rerank", "second look", "fit")
MINUTE = 60.0
log = logging.getLogger(__name__)


@dataclass
class Totals:
    """Of one arm, or of all: sums over requests that something was decided about."""

    decided: int = 0
    retrieved: int = 0
    degraded: int = 0
    looked_up: int = 0  # those that were shown passages
    search_seconds: float = 0.0
    passage_tokens: float = 0.0
    drafts: int = 0  # that were not the reply
    draft_seconds: float = 0.0
    draft_tokens: float = 0.0

    def see(self, trace: Trace, passage_tokens: float) -> None:
        assert trace.decision is not None
        self.decided += 1
        self.retrieved += trace.decision.retrieve
        self.degraded += bool(trace.degraded)
        if trace.passages:
            self.looked_up += 1
            self.passage_tokens += passage_tokens
            self.search_seconds += sum(trace.milliseconds.get(stage, 0.0) for stage in LOOKING_UP) / 1000
        if trace.decision.retrieve and trace.draft is not None:
            self.drafts += 1
            self.draft_tokens += trace.draft.n_tokens or estimate_tokens(trace.draft.text)
            self.draft_seconds += trace.milliseconds.get("draft", trace.milliseconds.get("read", 0.0)) / 1000

    def add(self, other: Totals) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    @property
    def skipped(self) -> int:
        return self.decided - self.retrieved

    def saved(self, options: ServeOptions) -> dict[str, float | None]:
        """retrievals, tokens, seconds, money; None where it is not known, or has no price."""
        if not self.looked_up:
            return {"retrievals": self.skipped, "tokens": None, "seconds": None, "money": None}
        read = self.skipped * self.passage_tokens / self.looked_up
        seconds = self.skipped * self.search_seconds / self.looked_up - self.draft_seconds
        money = self.skipped * options.price_retrieval + read * options.price_input_token
        money -= self.draft_tokens * options.price_output_token
        tokens = read - self.draft_tokens
        priced = options.price_retrieval or options.price_input_token or options.price_output_token
        return {"retrievals": self.skipped, "tokens": tokens, "seconds": seconds, "money": money if priced else None}


@dataclass
class Figures:
    """Of one server process, or of several together."""

    since: float = field(default_factory=time.time)
    requests: Counter[str] = field(default_factory=Counter)
    totals: dict[str, Totals] = field(default_factory=lambda: {"": Totals()})
    needs: dict[bool, list[int]] = field(default_factory=lambda: {True: [0] * BINS, False: [0] * BINS})
    minutes: dict[int, list[int]] = field(default_factory=dict)
    times: dict[str, deque[float]] = field(default_factory=dict)

    def see(self, route: str, status: int, seconds: float, trace: Trace) -> None:
        self.requests[f"{status // 100}xx"] += 1
        if trace.decision is None:
            return
        tokens = sum(estimate_tokens(f"{one.title} {one.text}") for one in trace.passages)
        for arm in {"", trace.arm}:
            self.totals.setdefault(arm, Totals()).see(trace, tokens)
        retrieved = trace.decision.retrieve
        if not trace.decision.rule and not trace.degraded:
            self.needs[retrieved][min(BINS - 1, int(trace.decision.need * BINS))] += 1
        self._see_minute(retrieved)
        for stage, taken in {**trace.milliseconds, "total": 1000 * seconds}.items():
            self.times.setdefault(stage, deque(maxlen=LAST)).append(taken)

    def _see_minute(self, retrieved: bool) -> None:
        minute = int(time.time() / MINUTE)
        self.minutes.setdefault(minute, [0, 0])[not retrieved] += 1
        if len(self.minutes) > MINUTES:
            del self.minutes[min(self.minutes)]

    # --- several processes --------------------------------------------------------------------------

    def told(self) -> str:
        """All of it but most of the times, for other processes."""
        return json.dumps(
            {
                "since": self.since,
                "requests": self.requests,
                "totals": {arm: asdict(totals) for arm, totals in self.totals.items()},
                "needs": [self.needs[True], self.needs[False]],
                "minutes": {str(minute): counts for minute, counts in self.minutes.items()},
                "times": {stage: list(times)[-TOLD:] for stage, times in self.times.items()},
            }
        )

    def with_others(self, told: Sequence[str]) -> Figures:
        """These and what other processes told of theirs; what cannot be read counts for nothing."""
        whole = Figures(self.since)
        for text in (self.told(), *told):
            try:
                whole._take(json.loads(text))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("What another worker counted cannot be read: %s", error)
        return whole

    def _take(self, told: dict[str, Any]) -> None:
        self.since = min(self.since, float(told["since"]))
        self.requests.update(told["requests"])
        for arm, totals in told["totals"].items():
            self.totals.setdefault(arm, Totals()).add(Totals(**totals))
        for retrieved, counts in zip((True, False), told["needs"], strict=True):
            self.needs[retrieved] = [ours + theirs for ours, theirs in zip(self.needs[retrieved], counts, strict=True)]
        for minute, (retrieved, skipped) in told["minutes"].items():
            counts = self.minutes.setdefault(int(minute), [0, 0])
            counts[0], counts[1] = counts[0] + retrieved, counts[1] + skipped
        for stage, times in told["times"].items():
            self.times.setdefault(stage, deque()).extend(times)

    def record(self, options: ServeOptions) -> dict[str, Any]:
        """As JSON."""
        now = int(time.time() / MINUTE)
        return {
            "since": self.since,
            "requests": dict(self.requests),
            "arms": {arm or "all": _about(totals, options) for arm, totals in self.totals.items()},
            "needs": {"retrieved": self.needs[True], "skipped": self.needs[False]},
            "minutes": [self.minutes.get(minute, [0, 0]) for minute in range(now - MINUTES + 1, now + 1)],
            "stages": {stage: _spread(list(times)) for stage, times in self.times.items()},
        }


def _about(totals: Totals, options: ServeOptions) -> dict[str, Any]:
    counted = {"decided": totals.decided, "retrieved": totals.retrieved, "degraded": totals.degraded}
    return {**counted, "skipped": totals.skipped, "saved": totals.saved(options)}


def _spread(times: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(times)
    places = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    found = {
        name: round(ordered[min(len(ordered) - 1, int(place * len(ordered)))], 3) for name, place in places.items()
    }
    return {"n": len(ordered), **found}
