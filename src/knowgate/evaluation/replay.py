"""What other thresholds would have done to traffic that is over: saved, and risked. Pure functions of events.

Always retrieving costs each question its open-book answer. A gate costs each question the reading, and then either the
open-book answer or the rest of the closed-book one. A log shows one of the two ways; the other is taken at the mean of
those questions that went it, and where none did, the saving is not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadInput, BadSetting
from knowgate.stats.proportions import Proportion, wilson_interval

EventAmounts = NDArray[np.float64]
EventFlags = NDArray[np.bool_]
COST_MEASURES = ("seconds", "prompt", "completion", "gpu")
COST_STAGES = ("read", "closed", "opened")
CLOSED_ONLY = "alone"
SECONDS_PER_HOUR = 3_600  # seconds
UNKNOWN_AMOUNT = math.nan


@dataclass(frozen=True, slots=True)
class EventCost:
    """Seconds, tokens read and tokens written, seconds of the LLM alone; NaN where a log does not say."""

    seconds: float = UNKNOWN_AMOUNT
    prompt: float = UNKNOWN_AMOUNT
    completion: float = UNKNOWN_AMOUNT
    gpu: float = UNKNOWN_AMOUNT


@dataclass(frozen=True, slots=True)
class TrafficEvent:
    """One question that was asked. retrieved is None where both answers were graded, as in a label run.

    read: what the gate's reading took; closed: going on to the closed-book answer; opened: looking up and answering.
    loses: skipping gives another answer than retrieving (a log) or a wrong one instead of a right one (a label run);
    None where only one answer is there.
    """

    need: float
    retrieved: bool | None = None
    read: EventCost = field(default_factory=EventCost)
    closed: EventCost = field(default_factory=EventCost)
    opened: EventCost = field(default_factory=EventCost)
    loses: bool | None = None
    alone: EventCost = field(default_factory=EventCost)  # the closed-book answer where there is no gate at all


@dataclass(frozen=True)
class Prices:
    """Of one search, one token read, one token written and an hour of the LLM's GPU, in any currency."""

    retrieval: float = 0.0
    input_token: float = 0.0
    output_token: float = 0.0
    gpu_hour: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (
            ("retrieval", self.retrieval),
            ("input-token", self.input_token),
            ("output-token", self.output_token),
            ("gpu-hour", self.gpu_hour),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise BadSetting(f"--price-{name} is {value}; a price is a number, 0 or more.")

    @property
    def are_given(self) -> bool:
        return self != Prices()


@dataclass(frozen=True)
class TrafficSaving:
    """Against what always retrieving costs; negative where the gate's reading costs more than it saves."""

    saved: float
    always: float


@dataclass(frozen=True)
class ThresholdResult:
    """One threshold. savings: None where the log does not say enough. risks: among which questions -> share lost."""

    threshold: float
    retrieved: int
    rate: float
    savings: dict[str, TrafficSaving | None]
    risks: dict[str, Proportion]


@dataclass(frozen=True)
class Traffic:
    """Events as columns."""

    events: Sequence[TrafficEvent]

    def __post_init__(self) -> None:
        if not self.events:
            raise BadInput("there is no question to replay. Log some: knowgate ask --json")

    @cached_property
    def needs(self) -> EventAmounts:
        return np.array([event.need for event in self.events])

    @cached_property
    def recorded(self) -> dict[str, dict[str, EventAmounts]]:
        """way -> measure -> per question, NaN where it is not on record."""
        return {
            way: {
                name: np.array([getattr(getattr(event, way), name) for event in self.events]) for name in COST_MEASURES
            }
            for way in (*COST_STAGES, CLOSED_ONLY)
        }

    @cached_property
    def costs(self) -> dict[str, dict[str, EventAmounts]]:
        """The same, with the mean of what is on record where it is not."""
        return {
            way: {name: _filled(column) for name, column in columns.items()} for way, columns in self.recorded.items()
        }

    def known(self, way: str) -> int:
        """For how many questions the log says what this way costs, in any measure."""
        return int(np.any([~np.isnan(column) for column in self.recorded[way].values()], axis=0).sum())

    @cached_property
    def checks(self) -> dict[str, tuple[EventAmounts, EventFlags]]:
        """Needs and losses of the questions whose two answers can be compared, by how that came about."""
        kinds = {"retrieved": True, "audited": False, "graded": None}
        compared = {
            name: [event for event in self.events if event.loses is not None and event.retrieved is kind]
            for name, kind in kinds.items()
        }
        return {
            name: (np.array([event.need for event in part]), np.array([event.loses for event in part], dtype=bool))
            for name, part in compared.items()
            if part
        }


def _filled(column: EventAmounts) -> EventAmounts:
    known = ~np.isnan(column)
    return np.where(known, column, column[known].mean()) if known.any() else column


def replay_traffic(traffic: Traffic, thresholds: Sequence[float], prices: Prices) -> list[ThresholdResult]:
    """Each threshold in rising order."""
    return [_line(traffic, threshold, prices) for threshold in sorted(set(thresholds))]


def _line(traffic: Traffic, threshold: float, prices: Prices) -> ThresholdResult:
    retrieve = traffic.needs > threshold
    n, count = len(retrieve), int(retrieve.sum())
    saved = {name: _saving(traffic, name, retrieve) for name in COST_MEASURES}
    retrievals = TrafficSaving(n - count, n)
    savings = {
        "retrievals": retrievals,
        "tokens": _sum((saved["prompt"], 1.0), (saved["completion"], 1.0)),
        "seconds": saved["seconds"],
        "money": _sum(
            (retrievals, prices.retrieval),
            (saved["prompt"], prices.input_token),
            (saved["completion"], prices.output_token),
            (saved["gpu"], prices.gpu_hour / SECONDS_PER_HOUR),
        ),
    }
    risks = {name: _risk((needs <= threshold) & loses) for name, (needs, loses) in traffic.checks.items()}
    return ThresholdResult(threshold, count, count / n, savings, risks)


def _risk(lost: EventFlags) -> Proportion:
    hits, n = int(lost.sum()), len(lost)
    return Proportion(hits, n, hits / n, *wilson_interval(hits, n))


def _saving(traffic: Traffic, measure: str, retrieve: EventFlags) -> TrafficSaving | None:
    read, closed, opened = (traffic.costs[way][measure] for way in COST_STAGES)
    always = float(opened.sum())
    gated = float((read + np.where(retrieve, opened, closed)).sum())
    return None if math.isnan(always) or math.isnan(gated) else TrafficSaving(always - gated, always)


def _sum(*parts: tuple[TrafficSaving | None, float]) -> TrafficSaving | None:
    """Savings at their prices; what has no price need not be known."""
    priced = [(saving, price) for saving, price in parts if price]
    if not priced or any(saving is None for saving, _ in priced):
        return None
    known = [(saving, price) for saving, price in priced if saving is not None]
    return TrafficSaving(
        sum(one.saved * price for one, price in known), sum(one.always * price for one, price in known)
    )
