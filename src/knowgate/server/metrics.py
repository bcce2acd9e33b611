"""What is counted, for Prometheus; by several workers together.

Labels are bounded: routes, statuses, gates; never a word of a question.
"""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from knowgate.server.breaker import Breaker
from knowgate.server.trace import Trace

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Metrics:
    """Of one server: a registry of its own, so that several can live in a process."""

    def __init__(self, breakers: list[Breaker]):
        self.registry = CollectorRegistry()
        self.breakers = breakers
        self.requests = self._counter("requests", "Requests by route and status.", ["route", "status"])
        labels = ["decision", "reason", "gate", "way"]
        self.decisions = self._counter("decisions", "Decisions by what made them.", labels)
        self.degraded = self._counter("degraded", "Requests that went on without a part.", ["part"])
        self.passages = self._counter("passages", "Passages put into requests.", [])
        self.duration = self._histogram(
            "request_duration_seconds", "From request to reply (streams: to their first byte).", ["route"]
        )
        self.stages = self._histogram("stage_duration_seconds", "What each stage of a request took.", ["stage"])
        words = "1 where a part is left alone."
        self.open = Gauge("knowgate_breaker_open", words, ["part"], registry=self.registry, multiprocess_mode="livemax")

    def _counter(self, name: str, words: str, labels: list[str]) -> Counter:
        return Counter(f"knowgate_{name}_total", words, labels, registry=self.registry)

    def _histogram(self, name: str, words: str, labels: list[str]) -> Histogram:
        return Histogram(f"knowgate_{name}", words, labels, buckets=SECONDS, registry=self.registry)

    def see(self, route: str, status: int, seconds: float, trace: Trace) -> None:
        self.requests.labels(route, str(status)).inc()
        self.duration.labels(route).observe(seconds)
        for stage, taken in trace.milliseconds.items():
            self.stages.labels(stage).observe(taken / 1000)
        for part in trace.degraded:
            self.degraded.labels(part).inc()
        if trace.decision is not None:
            verdict = "retrieve" if trace.decision.retrieve else "skip"
            self.decisions.labels(verdict, _reason(trace), trace.decision.gate, trace.way).inc()
            self.passages.inc(len(trace.passages))

    @property
    def text(self) -> bytes:
        for breaker in self.breakers:
            self.open.labels(breaker.name).set(breaker.state != "closed")
        if not _shares():
            return generate_latest(self.registry)
        of_all = CollectorRegistry()
        MultiProcessCollector(of_all)  # type: ignore[no-untyped-call]
        return generate_latest(of_all)

    def close(self) -> None:
        """Counts stay; a worker that is gone leaves nothing alone any more."""
        if _shares():
            mark_process_dead(os.getpid())  # type: ignore[no-untyped-call]


def _shares() -> bool:
    """Several workers count together (prometheus_client reads this name when it is imported)."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


def _reason(trace: Trace) -> str:
    if trace.degraded:
        return "degraded"
    return "rule" if trace.decision is not None and trace.decision.rule else "score"
