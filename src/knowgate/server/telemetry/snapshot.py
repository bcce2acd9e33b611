"""What the server did since it started: counts, needs, times, what skipping saved. No texts.

Saved is net: what a skipped request would have spent on passages, less what drafts cost that were not the reply. It is
taken at the mean of the requests that were looked up, so that nothing is known before the first of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from knowgate.core.text import estimate_tokens
from knowgate.server.database import Store
from knowgate.server.json_api import ApiError
from knowgate.server.options import ServeOptions
from knowgate.server.telemetry.decision_log import DecisionLog
from knowgate.server.telemetry.trace import RequestTrace

NEED_BINS = 20
MINUTES_SHOWN = 60
MAX_STAGE_TIMES = 500  # times of a stage that are kept
SHARED_STAGE_TIMES = 100  # of them that other workers hear of
RETRIEVAL_STAGES = ("retrieve", "rerank", "second look", "fit")
MINUTE_SECONDS = 60.0
log = logging.getLogger(__name__)


@dataclass
class DecisionTotals:
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

    def see(self, trace: RequestTrace, passage_tokens: float) -> None:
        assert trace.decision is not None
        self.decided += 1
        self.retrieved += trace.decision.retrieve
        self.degraded += bool(trace.degraded)
        if trace.passages:
            self.looked_up += 1
            self.passage_tokens += passage_tokens
            self.search_seconds += sum(trace.milliseconds.get(stage, 0.0) for stage in RETRIEVAL_STAGES) / 1000
        if trace.decision.retrieve and trace.draft is not None:
            self.drafts += 1
            self.draft_tokens += trace.draft.n_tokens or estimate_tokens(trace.draft.text)
            self.draft_seconds += trace.milliseconds.get("draft", trace.milliseconds.get("read", 0.0)) / 1000

    def add(self, other: DecisionTotals) -> None:
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
class MetricsSnapshot:
    """Of one server process, or of several together."""

    since: float = field(default_factory=time.time)
    requests: Counter[str] = field(default_factory=Counter)
    totals: dict[str, DecisionTotals] = field(default_factory=lambda: {"": DecisionTotals()})
    needs: dict[bool, list[int]] = field(default_factory=lambda: {True: [0] * NEED_BINS, False: [0] * NEED_BINS})
    minutes: dict[int, list[int]] = field(default_factory=dict)
    times: dict[str, deque[float]] = field(default_factory=dict)

    def see(self, route: str, status: int, seconds: float, trace: RequestTrace) -> None:
        self.requests[f"{status // 100}xx"] += 1
        if trace.decision is None:
            return
        tokens = sum(estimate_tokens(f"{one.title} {one.text}") for one in trace.passages)
        for arm in {"", trace.arm}:
            self.totals.setdefault(arm, DecisionTotals()).see(trace, tokens)
        retrieved = trace.decision.retrieve
        if not trace.decision.rule and not trace.degraded:
            self.needs[retrieved][min(NEED_BINS - 1, int(trace.decision.need * NEED_BINS))] += 1
        self._see_minute(retrieved)
        for stage, taken in {**trace.milliseconds, "total": 1000 * seconds}.items():
            self.times.setdefault(stage, deque(maxlen=MAX_STAGE_TIMES)).append(taken)

    def _see_minute(self, retrieved: bool) -> None:
        minute = int(time.time() / MINUTE_SECONDS)
        self.minutes.setdefault(minute, [0, 0])[not retrieved] += 1
        if len(self.minutes) > MINUTES_SHOWN:
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
                "times": {stage: list(times)[-SHARED_STAGE_TIMES:] for stage, times in self.times.items()},
            }
        )

    def with_others(self, told: Sequence[str]) -> MetricsSnapshot:
        """These and what other processes told of theirs; what cannot be read counts for nothing."""
        whole = MetricsSnapshot(self.since)
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
            self.totals.setdefault(arm, DecisionTotals()).add(DecisionTotals(**totals))
        for retrieved, counts in zip((True, False), told["needs"], strict=True):
            self.needs[retrieved] = [ours + theirs for ours, theirs in zip(self.needs[retrieved], counts, strict=True)]
        for minute, (retrieved, skipped) in told["minutes"].items():
            counts = self.minutes.setdefault(int(minute), [0, 0])
            counts[0], counts[1] = counts[0] + retrieved, counts[1] + skipped
        for stage, times in told["times"].items():
            self.times.setdefault(stage, deque()).extend(times)

    def record(self, options: ServeOptions) -> dict[str, Any]:
        """As JSON."""
        now = int(time.time() / MINUTE_SECONDS)
        return {
            "since": self.since,
            "requests": dict(self.requests),
            "arms": {arm or "all": _about(totals, options) for arm, totals in self.totals.items()},
            "needs": {"retrieved": self.needs[True], "skipped": self.needs[False]},
            "minutes": [self.minutes.get(minute, [0, 0]) for minute in range(now - MINUTES_SHOWN + 1, now + 1)],
            "stages": {stage: _spread(list(times)) for stage, times in self.times.items()},
        }


def _about(totals: DecisionTotals, options: ServeOptions) -> dict[str, Any]:
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


Result = TypeVar("Result")
SERVER_ENV, COUNTS_ENV = (
    "KNOWGATE_SERVER",
    "KNOWGATE_COUNTS",
)  # of the workers of one server, set by who starts them
WRITE_DELAY, HEARTBEAT_SECONDS = (
    1.0,
    60.0,
)  # seconds until what is new is written, and until it is said that this worker is still there
WORKER_TIMEOUT = 3 * HEARTBEAT_SECONDS  # seconds after which a worker of another server does not count any more
MAX_SNAPSHOT_AGE = 86_400.0
UPSERT_SNAPSHOT = (
    "INSERT INTO figures VALUES (?, ?, ?, ?) "
    "ON CONFLICT (worker) DO UPDATE SET at = excluded.at, record = excluded.record"
)
SELECT_OTHER_SNAPSHOTS = "SELECT record FROM figures WHERE worker <> ? AND (server = ? OR at > ?)"


class SnapshotExchange:
    """tell: what this worker counted, as a text. log: where decisions are kept; None where they are not."""

    def __init__(self, tell: Callable[[], str], decisions: DecisionLog | None):
        self._tell = tell
        self._worker = uuid.uuid4().hex
        self._server = os.environ.get(SERVER_ENV) or self._worker
        place = os.environ.get(COUNTS_ENV)
        self._own = DecisionLog(place, keeps_questions=False) if decisions is None and place else None
        self._log = decisions or self._own
        self._planned: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def note(self) -> None:
        """Something new was counted; returns at once."""
        if self._log is not None and (self._planned is None or self._planned.when() > _now() + WRITE_DELAY):
            self._plan(WRITE_DELAY)

    def _plan(self, seconds: float) -> None:
        if self._planned is not None:
            self._planned.cancel()
        self._planned = asyncio.get_running_loop().call_later(seconds, self._begin)

    def _begin(self) -> None:
        self._writing = asyncio.get_running_loop().create_task(self.write())
        self._planned = None
        self._plan(HEARTBEAT_SECONDS)

    async def write(self) -> None:
        row = [self._worker, self._server, time.time(), self._tell()]

        def work(store: Store) -> None:
            with store.writing() as writes:
                writes.execute(UPSERT_SNAPSHOT, row)
                writes.execute("DELETE FROM figures WHERE at < ?", [time.time() - MAX_SNAPSHOT_AGE])

        await self._beside(work, None)

    async def others(self) -> list[str]:
        """What the other workers told: of this server, and of others that are still there."""
        if self._log is None:
            return []
        values = [self._worker, self._server, time.time() - WORKER_TIMEOUT]
        nothing: list[tuple[Any, ...]] = []
        rows = await self._beside(lambda store: store.rows(SELECT_OTHER_SNAPSHOTS, values), nothing)
        return [str(row[0]) for row in rows]

    async def _beside(self, work: Callable[[Store], Result], instead: Result) -> Result:
        """What fails here is in nobody's way."""
        if self._log is None:
            return instead
        try:
            return await self._log.beside(work)
        except ApiError:
            return instead

    async def close(self) -> None:
        """After the last count was told."""
        if self._planned is not None:
            self._planned.cancel()
            await self.write()
        if self._own is not None:
            self._own.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
