"""What is learnt from traffic, for Prometheus: read off when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from knowgate.server.learning.learner import Learner


class Gauges(Collector):
    def __init__(self, learner: Learner):
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


def gauges_text(learner: Learner | None) -> bytes:
    """What is said beside the server's own counts; each worker says it, from what all of them found out."""
    if learner is None:
        return b""
    registry = CollectorRegistry()
    registry.register(Gauges(learner))
    return generate_latest(registry)


def _gauge(name: str, words: str, values: dict[str, float | None]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"knowgate_{name}", words, labels=["arm"])
    for arm, value in values.items():
        if value is not None:
            family.add_metric([arm], value)
    return family
