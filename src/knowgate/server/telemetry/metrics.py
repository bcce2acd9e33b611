"""What is counted, for Prometheus; by several workers together.

Labels are bounded: routes, statuses, gates; never a word of a question.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from knowgate.server.circuit_breaker import CircuitBreaker
from knowgate.server.learning.learner import TrafficLearner
from knowgate.server.telemetry.trace import RequestTrace

DURATION_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class ServerMetrics:
    """Of one server: a registry of its own, so that several can live in a process."""

    def __init__(self, breakers: list[CircuitBreaker]):
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
        return Histogram(f"knowgate_{name}", words, labels, buckets=DURATION_BUCKETS, registry=self.registry)

    def see(self, route: str, status: int, seconds: float, trace: RequestTrace) -> None:
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


def _reason(trace: RequestTrace) -> str:
    if trace.degraded:
        return "degraded"
    return "rule" if trace.decision is not None and trace.decision.rule else "score"


class LearningCollector(Collector):
    def __init__(self, learner: TrafficLearner):
        self.learner = learner

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        arms = self.learner.auditor.arms.arms
        watches = {name: arm.watch for name, arm in arms.items()}
        yield _gauge("loss", "Share of answers that skipping costs.", {k: w.loss.mean for k, w in watches.items()})
        yield _gauge("loss_low", "Its lower bound, at all times.", {k: w.loss.low for k, w in watches.items()})
        yield _gauge("loss_high", "Its upper bound, at all times.", {k: w.loss.high for k, w in watches.items()})
        yield _gauge("loss_promised", "What was promised.", {k: w.promised for k, w in watches.items()})
        yield _gauge("alarm", "1 while everything is looked up.", {k: float(bool(w.alarm)) for k, w in watches.items()})
        yield _gauge("far", "Share of questions unlike those of the fit.", {k: w.far.mean for k, w in watches.items()})
        audits = CounterMetricFamily("knowgate_audits", "Audits by what became of them.", labels=["arm", "result"])
        for (arm, result), count in self.learner.auditor.counts.items():
            audits.add_metric([arm, result], count)
        yield audits


def format_learning_metrics(learner: TrafficLearner | None) -> bytes:
    """What is said beside the server's own counts; each worker says it, from what all of them found out."""
    if learner is None:
        return b""
    registry = CollectorRegistry()
    registry.register(LearningCollector(learner))
    return generate_latest(registry)


def _gauge(name: str, words: str, values: dict[str, float | None]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"knowgate_{name}", words, labels=["arm"])
    for arm, value in values.items():
        if value is not None:
            family.add_metric([arm], value)
    return family
