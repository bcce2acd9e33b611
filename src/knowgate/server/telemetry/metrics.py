"""Prometheus metrics of requests, and of audits and A/B tests, combined over all workers of a server.

The labels have few different values (routes, statuses, gates), and never contain the text of a question.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from knowgate.core.files import file_lock
from knowgate.server.circuit_breaker import BreakersByKey, CircuitBreaker
from knowgate.server.learning.learner import TrafficLearner
from knowgate.server.learning.loss_monitor import LossMonitor
from knowgate.server.telemetry.trace import RequestTrace

log = logging.getLogger(__name__)
Result = TypeVar("Result")
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # name of the environment variable that `prometheus_client` reads
LOCK_FILE = "lock"
PAUSE_SECONDS = 0.2  # between two runs of a shared call
DURATION_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# Name of a gauge -> its description, and the function that reads its value (None: no value yet).
ARM_GAUGES: dict[str, tuple[str, Callable[[LossMonitor], float | None]]] = {
    "loss": ("Share of answers that skipping retrieval changes.", lambda monitor: monitor.loss.mean),
    "loss_low": ("Lower confidence bound of knowgate_loss.", lambda monitor: monitor.low),
    "loss_high": ("Upper confidence bound of knowgate_loss.", lambda monitor: monitor.high),
    "loss_promised": ("Maximum share of changed answers, which the alarm tests.", lambda monitor: monitor.max_changed),
    "alarm": (
        "1 while all requests retrieve because too many answers change, otherwise 0.",
        lambda monitor: bool(monitor.alarm),
    ),
    "key_alarms": (
        "Number of API keys whose requests retrieve because too many of their answers change.",
        lambda monitor: len(monitor.key_alarms),
    ),
    "far": ("Share of questions of this worker that are unlike the training data.", lambda monitor: monitor.drift.mean),
}


class SharedCall(Generic[Result]):
    """Call whose result is shared by all requests that wait for it.

    It runs once at a time, with pauses. A request never gets a result from before its arrival.
    """

    def __init__(self) -> None:
        self._waiting: asyncio.Task[Result] | None = None  # the call that has not started yet
        self._lock = asyncio.Lock()
        self._next_start = 0.0  # earliest time of `time.monotonic`

    async def run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Await `work()`, or the same call of another request."""
        if self._waiting is None:
            self._waiting = asyncio.create_task(self._run_after_pause(work))
            # Asyncio logs exceptions of tasks that nobody reads, so read the exception here.
            self._waiting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._waiting)

    async def _run_after_pause(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Wait until the call before has ended and for the pause, then run. Other requests run in between."""
        async with self._lock:
            await asyncio.sleep(max(0.0, self._next_start - time.monotonic()))
            self._waiting = None  # later requests get a newer result
            try:
                return await work()
            finally:
                self._next_start = time.monotonic() + PAUSE_SECONDS


class ServerMetrics:
    """Prometheus metrics of one server. A separate registry allows several servers in one process.

    Args:
        breakers: Circuit breakers whose states are reported.
    """

    def __init__(self, breakers: list[CircuitBreaker | BreakersByKey]):
        self.registry = CollectorRegistry()
        self.breakers = breakers
        self._formatting = SharedCall[bytes]()
        self.requests = self._counter("requests", "Requests by route and status.", ["route", "status"])
        labels = ["decision", "reason", "gate", "way"]
        self.decisions = self._counter(
            "decisions", "Decisions to retrieve or skip, by reason, gate and way of answering.", labels
        )
        self.degraded = self._counter(
            "degraded", "Requests that were answered although a component failed, by component.", ["part"]
        )
        self.lost_decisions = self._counter(
            "lost_decisions", "Decisions that could not be stored in the decision log, by reason.", ["reason"]
        )
        self.passages = self._counter("passages", "Passages inserted into requests.", [])
        self.audits = self._counter(
            "audits",
            "Audits by result: `loss` if both answers were compared, whether or not they differ.",
            ["arm", "result"],
        )
        self.duration = self._histogram(
            "request_duration_seconds", "Seconds until the response starts, by route.", ["route"]
        )
        self.stages = self._histogram(
            "stage_duration_seconds", "Seconds that each stage of a request takes.", ["stage"]
        )
        self.open_breakers = Gauge(
            "knowgate_breaker_open",
            "1 while the circuit breaker of a component is open or half-open, otherwise 0.",
            ["part"],
            registry=self.registry,
            multiprocess_mode="livemax",
        )

    def _counter(self, name: str, description: str, labels: list[str]) -> Counter:
        """Create a counter in the registry of this server."""
        return Counter(f"knowgate_{name}_total", description, labels, registry=self.registry)

    def _histogram(self, name: str, description: str, labels: list[str]) -> Histogram:
        """Create a histogram of durations in the registry of this server."""
        return Histogram(f"knowgate_{name}", description, labels, buckets=DURATION_BUCKETS, registry=self.registry)

    def add_request(self, route: str, status: int, seconds: float, trace: RequestTrace) -> None:
        """Count a request and its decision. `seconds` is the time until the response."""
        self.requests.labels(route, str(status)).inc()
        self.duration.labels(route).observe(seconds)
        for stage, milliseconds in trace.milliseconds.items():
            self.stages.labels(stage).observe(milliseconds / 1000)
        for part in trace.degraded:
            self.degraded.labels(part).inc()
        if trace.decision is not None:
            decision = "retrieve" if trace.decision.retrieve else "skip"
            decided_by = "rule" if trace.decision.rule else "score"
            reason = "degraded" if trace.degraded else decided_by
            self.decisions.labels(decision, reason, trace.decision.gate, trace.way).inc()
            self.passages.inc(len(trace.passages))

    def add_lost_decisions(self, reason: str, count: int) -> None:
        """Count decisions that could not be stored. May be called in any thread."""
        self.lost_decisions.labels(reason).inc(count)

    def add_audit(self, arm: str, result: str) -> None:
        """Count an audit of a gate (arm of the A/B test) by its result."""
        self.audits.labels(arm, result).inc()

    def count_audits(self, arm: str) -> dict[str, int]:
        """Return the number of audits of an arm by result, over all workers."""
        metrics = [metric for metric in self._get_combined_registry().collect() if metric.name == "knowgate_audits"]
        samples = [sample for metric in metrics for sample in metric.samples if sample.name == "knowgate_audits_total"]
        return {sample.labels["result"]: int(sample.value) for sample in samples if sample.labels["arm"] == arm}

    async def format_shared(self, learner: TrafficLearner | None) -> bytes:
        """Return all metrics as `format` does, formatted once for all requests that wait for them."""

        async def format_all() -> bytes:
            return self.format(learner)

        return await self._formatting.run(format_all)

    def format(self, learner: TrafficLearner | None) -> bytes:
        """Return all metrics in the text format of Prometheus.

        Args:
            learner: Component that runs audits and A/B tests, whose metrics are included if there is one.
        """
        self.update_breakers()
        requests = generate_latest(self._get_combined_registry())
        if learner is None:
            return requests
        registry = CollectorRegistry()
        registry.register(LearningCollector(learner))
        return requests + generate_latest(registry)

    def update_breakers(self) -> None:
        """Set the gauges of the circuit breakers. With several workers, any of them may answer the next GET /metrics."""
        for breaker in self.breakers:
            self.open_breakers.labels(breaker.name).set(breaker.state != "closed")

    def _get_combined_registry(self) -> CollectorRegistry:
        """Return the metrics of this process or, if there are several workers, of all of them."""
        if not _has_several_workers():
            return self.registry
        registry = CollectorRegistry()
        WorkerCollector(registry)  # type: ignore[no-untyped-call]
        return registry

    def close(self) -> None:
        """Remove the gauges of this worker."""
        remove_gauges(os.getpid())


def remove_gauges(worker_pid: int | None) -> None:
    """Remove the gauges of a worker that ends or has ended. Its counters stay in the sums over all workers."""
    if _has_several_workers():
        mark_process_dead(worker_pid)  # type: ignore[no-untyped-call]


def merge_worker(worker_pid: int | None) -> None:
    """Remove the gauges of a worker process that has ended, and add its counters to those of all ended workers.

    Without this, each reload would leave files behind, which are read for each request to /metrics. This uses the files of
    `prometheus_client` directly, because that library has no function for it.
    """
    remove_gauges(worker_pid)
    if not _has_several_workers():
        return
    folder = Path(os.environ[FOLDER_VARIABLE])
    try:
        with file_lock(folder / LOCK_FILE):
            for kind in ("counter", "histogram"):
                file = folder / f"{kind}_{worker_pid}.db"
                if _has_content(file):
                    _add_values(file, folder / f"{kind}_ended.db")
                    file.unlink()
    except (OSError, RuntimeError, ValueError, struct.error) as error:  # such as a full disk, or half a row
        log.warning("The metrics of the ended worker %s stay in files of their own: %s", worker_pid, error)


def _add_values(file: Path, sums_file: Path) -> None:
    """Add the values in a file of `prometheus_client` to those in another one."""
    rows = list(MmapedDict.read_all_values_from_file(str(file)))  # type: ignore[no-untyped-call]
    # Space is reserved by writing zeros, which fails if the disk is full. A memory map would end the process then.
    with sums_file.open("ab") as sums_data:
        needed = _count_used_bytes(sums_file) + _count_used_bytes(file)
        sums_data.write(bytes(max(0, needed - sums_file.stat().st_size)))
    sums = MmapedDict(str(sums_file))  # type: ignore[no-untyped-call]
    try:
        for key, value, timestamp, _ in rows:
            sums.write_value(key, sums.read_value(key)[0] + value, timestamp)  # type: ignore[no-untyped-call]
    finally:
        sums.close()  # type: ignore[no-untyped-call]


def _count_used_bytes(file: Path) -> int:
    """Return how much of a file of `prometheus_client` is used. Its first number says so; 8 bytes are always used."""
    with file.open("rb") as data:
        head = data.read(4)
    return max(8, struct.unpack("i", head)[0]) if len(head) == 4 else 8


def _has_several_workers() -> bool:
    """Return whether several workers share their metrics. Then the variable of `prometheus_client` for this is set."""
    return FOLDER_VARIABLE in os.environ


class WorkerCollector(MultiProcessCollector):
    """Prometheus collector that reads the metrics of all workers. A worker that starts has empty files for a moment."""

    def collect(self) -> Any:
        """Return the combined metrics."""
        folder = Path(self._path)
        with file_lock(folder / LOCK_FILE):  # otherwise, counters that are being moved could be missing or count twice
            files = [str(path) for path in folder.glob("*.db") if _has_content(path)]
            return self.merge(files)  # type: ignore[no-untyped-call]


def _has_content(path: Path) -> bool:
    """Return whether a file has content. The gauges of a worker that has ended may be gone."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


class LearningCollector(Collector):
    """Prometheus collector that reads the current metrics of a `TrafficLearner` when they are requested."""

    def __init__(self, learner: TrafficLearner):
        self.learner = learner

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges of each gate (arm) in the A/B test."""
        arms = self.learner.auditor.experiment.arms
        for name, (description, get_value) in ARM_GAUGES.items():
            gauge = GaugeMetricFamily(f"knowgate_{name}", description, labels=["arm"])
            for arm_name, arm in arms.items():
                value = get_value(arm.monitor)
                if value is not None:
                    gauge.add_metric([arm_name], value)
            yield gauge
