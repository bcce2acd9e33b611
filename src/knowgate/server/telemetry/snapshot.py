"""Statistics since the server started: counts, needs, timings and savings, combined over all server processes.

Savings are net: what the skipped requests would have spent on passages, minus the cost of drafts that were discarded.
The cost of passages is the mean over the requests that got some, so savings are unknown before the first of them.
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

log = logging.getLogger(__name__)

Result = TypeVar("Result")
NEED_BINS = 20
MINUTES_SHOWN = 60
MINUTE_SECONDS = 60.0
MAX_STAGE_TIMES = 500  # timings stored for each stage
SHARED_STAGE_TIMES = 100  # timings of each stage that are sent to other processes
RETRIEVAL_STAGES = ("retrieve", "rerank", "second look", "fit")
SERVER_ID_VARIABLE, COUNTS_FILE_VARIABLE = "KNOWGATE_SERVER", "KNOWGATE_COUNTS"  # set by the parent of the workers
WRITE_DELAY_SECONDS, HEARTBEAT_SECONDS = 1.0, 60.0
WORKER_TIMEOUT_SECONDS = 3 * HEARTBEAT_SECONDS  # a silent worker of another server is considered gone
MAX_SNAPSHOT_AGE_SECONDS = 86_400.0
UPSERT_SNAPSHOT = (
    "INSERT INTO figures VALUES (?, ?, ?, ?) "
    "ON CONFLICT (worker) DO UPDATE SET at = excluded.at, record = excluded.record"
)
SELECT_OTHER_SNAPSHOTS = "SELECT record FROM figures WHERE worker <> ? AND (server = ? OR at > ?)"


@dataclass
class DecisionTotals:
    """Sums over the requests that were decided, for one experiment arm or for all requests."""

    decided: int = 0
    retrieved: int = 0
    degraded: int = 0
    with_passages: int = 0
    search_seconds: float = 0.0
    passage_tokens: float = 0.0
    discarded_drafts: int = 0
    draft_seconds: float = 0.0
    draft_tokens: float = 0.0

    def add_request(self, trace: RequestTrace, passage_tokens: float) -> None:
        assert trace.decision is not None
        self.decided += 1
        self.retrieved += trace.decision.retrieve
        self.degraded += bool(trace.degraded)
        if trace.passages:
            self.with_passages += 1
            self.passage_tokens += passage_tokens
            self.search_seconds += sum(trace.milliseconds.get(stage, 0.0) for stage in RETRIEVAL_STAGES) / 1000
        if trace.decision.retrieve and trace.draft is not None:
            self.discarded_drafts += 1
            self.draft_tokens += trace.draft.n_tokens or estimate_tokens(trace.draft.text)
            self.draft_seconds += trace.milliseconds.get("draft", trace.milliseconds.get("read", 0.0)) / 1000

    def merge(self, other: DecisionTotals) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    @property
    def skipped(self) -> int:
        return self.decided - self.retrieved

    def compute_savings(self, options: ServeOptions) -> dict[str, float | None]:
        """Return what skipping saved: searches, tokens, seconds and money (None: unknown, or without a price)."""
        if not self.with_passages:
            return {"retrievals": self.skipped, "tokens": None, "seconds": None, "money": None}
        unread_tokens = self.skipped * self.passage_tokens / self.with_passages
        seconds = self.skipped * self.search_seconds / self.with_passages - self.draft_seconds
        money = self.skipped * options.price_retrieval + unread_tokens * options.price_input_token
        money -= self.draft_tokens * options.price_output_token
        has_prices = options.price_retrieval or options.price_input_token or options.price_output_token
        tokens = unread_tokens - self.draft_tokens
        return {
            "retrievals": self.skipped,
            "tokens": tokens,
            "seconds": seconds,
            "money": money if has_prices else None,
        }

    def to_json(self, options: ServeOptions) -> dict[str, Any]:
        counts = {"decided": self.decided, "retrieved": self.retrieved, "degraded": self.degraded}
        return {**counts, "skipped": self.skipped, "saved": self.compute_savings(options)}


@dataclass
class MetricsSnapshot:
    """Statistics of one server process, or of several combined."""

    since: float = field(default_factory=time.time)
    requests: Counter[str] = field(default_factory=Counter)
    totals: dict[str, DecisionTotals] = field(default_factory=lambda: {"": DecisionTotals()})
    needs: dict[bool, list[int]] = field(default_factory=lambda: {True: [0] * NEED_BINS, False: [0] * NEED_BINS})
    minutes: dict[int, list[int]] = field(default_factory=dict)
    times: dict[str, deque[float]] = field(default_factory=dict)

    def add_request(self, status: int, seconds: float, trace: RequestTrace) -> None:
        """Count a request that was answered with this HTTP status after so many seconds."""
        self.requests[f"{status // 100}xx"] += 1
        if trace.decision is None:
            return
        passage_tokens = sum(estimate_tokens(f"{passage.title} {passage.text}") for passage in trace.passages)
        for arm in {"", trace.arm}:
            self.totals.setdefault(arm, DecisionTotals()).add_request(trace, passage_tokens)
        is_retrieved = trace.decision.retrieve
        if not trace.decision.rule and not trace.degraded:
            self.needs[is_retrieved][min(NEED_BINS - 1, int(trace.decision.need * NEED_BINS))] += 1
        self._count_minute(is_retrieved)
        for stage, milliseconds in {**trace.milliseconds, "total": 1000 * seconds}.items():
            self.times.setdefault(stage, deque(maxlen=MAX_STAGE_TIMES)).append(milliseconds)

    def _count_minute(self, is_retrieved: bool) -> None:
        minute = int(time.time() / MINUTE_SECONDS)
        self.minutes.setdefault(minute, [0, 0])[not is_retrieved] += 1
        if len(self.minutes) > MINUTES_SHOWN:
            del self.minutes[min(self.minutes)]

    def serialize(self) -> str:
        """Return the statistics as JSON for other processes."""
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

    def combine(self, serialized: Sequence[str]) -> MetricsSnapshot:
        """Return the sum of these statistics and of the serialized ones of other processes."""
        combined = MetricsSnapshot(self.since)
        for text in (self.serialize(), *serialized):
            try:
                combined._merge(json.loads(text))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("The statistics of another worker are ignored because they cannot be read: %s", error)
        return combined

    def _merge(self, other: dict[str, Any]) -> None:
        self.since = min(self.since, float(other["since"]))
        self.requests.update(other["requests"])
        for arm, totals in other["totals"].items():
            self.totals.setdefault(arm, DecisionTotals()).merge(DecisionTotals(**totals))
        for is_retrieved, counts in zip((True, False), other["needs"], strict=True):
            self.needs[is_retrieved] = [a + b for a, b in zip(self.needs[is_retrieved], counts, strict=True)]
        for minute, (retrieved, skipped) in other["minutes"].items():
            counts = self.minutes.setdefault(int(minute), [0, 0])
            counts[0], counts[1] = counts[0] + retrieved, counts[1] + skipped
        for stage, times in other["times"].items():
            self.times.setdefault(stage, deque()).extend(times)

    def to_json(self, options: ServeOptions) -> dict[str, Any]:
        """Return the statistics for the dashboard."""
        now = int(time.time() / MINUTE_SECONDS)
        return {
            "since": self.since,
            "requests": dict(self.requests),
            "arms": {arm or "all": totals.to_json(options) for arm, totals in self.totals.items()},
            "needs": {"retrieved": self.needs[True], "skipped": self.needs[False]},
            "minutes": [self.minutes.get(minute, [0, 0]) for minute in range(now - MINUTES_SHOWN + 1, now + 1)],
            "stages": {stage: _compute_percentiles(list(times)) for stage, times in self.times.items()},
        }


def _compute_percentiles(milliseconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(milliseconds)
    percentiles = {
        f"p{percent}": round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 3)
        for percent in (50, 95, 99)
    }
    return {"n": len(ordered), **percentiles}


class SnapshotExchange:
    """Shares the statistics of this process with other server processes, through a table.

    The table is in the decision log, so that several machines can share it. Without a decision log, the workers of one
    server use a temporary file, named by an environment variable. Failures are logged and otherwise ignored.

    Args:
        serialize: Returns the statistics of this process.
        decisions: The decision log, if there is one.
    """

    def __init__(self, serialize: Callable[[], str], decisions: DecisionLog | None):
        self._serialize = serialize
        self._worker_id = uuid.uuid4().hex
        self._server_id = os.environ.get(SERVER_ID_VARIABLE) or self._worker_id
        file = os.environ.get(COUNTS_FILE_VARIABLE)
        self._temporary_log = DecisionLog(file, stores_questions=False) if decisions is None and file else None
        self._log = decisions or self._temporary_log
        self._timer: asyncio.TimerHandle | None = None
        self._write_task: asyncio.Task[None] | None = None

    def schedule_write(self) -> None:
        """Write the statistics within a second."""
        now = asyncio.get_running_loop().time()
        if self._log is not None and (self._timer is None or self._timer.when() > now + WRITE_DELAY_SECONDS):
            self._set_timer(WRITE_DELAY_SECONDS)

    def _set_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._start_write)

    def _start_write(self) -> None:
        self._write_task = asyncio.get_running_loop().create_task(self._write())
        self._timer = None
        self._set_timer(HEARTBEAT_SECONDS)

    async def _write(self) -> None:
        row = [self._worker_id, self._server_id, time.time(), self._serialize()]

        def write(store: Store) -> None:
            with store.transaction() as transaction:
                transaction.execute(UPSERT_SNAPSHOT, row)
                transaction.execute("DELETE FROM figures WHERE at < ?", [time.time() - MAX_SNAPSHOT_AGE_SECONDS])

        await self._run(write, None)

    async def read_others(self) -> list[str]:
        """Return the serialized statistics of the other live server processes."""
        values = [self._worker_id, self._server_id, time.time() - WORKER_TIMEOUT_SECONDS]
        no_rows: list[tuple[Any, ...]] = []
        rows = await self._run(lambda store: store.fetch_rows(SELECT_OTHER_SNAPSHOTS, values), no_rows)
        return [str(row[0]) for row in rows]

    async def _run(self, work: Callable[[Store], Result], default: Result) -> Result:
        """Run work on the tables; return the default if they are unavailable."""
        if self._log is None:
            return default
        try:
            return await self._log.run(work)
        except ApiError:
            return default

    async def close(self) -> None:
        """Write the final statistics."""
        if self._timer is not None:
            self._timer.cancel()
            await self._write()
        if self._temporary_log is not None:
            self._temporary_log.close()
