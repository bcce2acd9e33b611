"""Replay of logged traffic at other thresholds: what each would have saved and risked.

Always retrieving costs every question its open-book answer. A gate costs every question its reading, and then either
the open-book answer or the rest of the closed-book one. A log records one of the two; the other is estimated by the
mean of the questions that have it. If no question has it, the saving is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from knowgate.core.options import Options
from knowgate.errors import BadInput
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.stats.proportions import Proportion, wilson_interval

COST_MEASURES = ("seconds", "prompt", "completion", "gpu")
COST_STAGES = ("reading", "closed", "opened")
CLOSED_ONLY = "closed_only"
SECONDS_PER_HOUR = 3_600
UNKNOWN_AMOUNT = math.nan

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Prices(Options):
    """Prices in one currency."""

    search: Price = Field(
        default=0.0, description="Price of one search.", json_schema_extra={"flag_name": "price-search"}
    )
    input_token: Price = Field(
        default=0.0,
        description="Price of one prompt token, e.g. 3e-7.",
        json_schema_extra={"flag_name": "price-input-token"},
    )
    output_token: Price = Field(
        default=0.0,
        description="Price of one generated token, e.g. 1.2e-6.",
        json_schema_extra={"flag_name": "price-output-token"},
    )
    gpu_hour: Price = Field(
        default=0.0,
        description="Price of an hour of the LLM's GPU, if tokens have no price.",
        json_schema_extra={"flag_name": "price-gpu-hour"},
    )

    @property
    def are_given(self) -> bool:
        """Whether any price is above 0."""
        return any(self.to_dict().values())

    def to_dict(self) -> dict[str, float]:
        """Convert to plain data, with the keys that `replay` and `cost` print."""
        return {
            "retrieval": self.search,
            "input_token": self.input_token,
            "output_token": self.output_token,
            "gpu_hour": self.gpu_hour,
        }


@dataclass(frozen=True, slots=True)
class EventCost:
    """Cost of one stage of a question; NaN if unknown.

    Attributes:
        seconds: Time.
        prompt: Tokens read by the LLM.
        completion: Tokens written by the LLM.
        gpu: Seconds of the LLM alone.
    """

    seconds: float = UNKNOWN_AMOUNT
    prompt: float = UNKNOWN_AMOUNT
    completion: float = UNKNOWN_AMOUNT
    gpu: float = UNKNOWN_AMOUNT


@dataclass(frozen=True, slots=True)
class TrafficEvent:
    """One logged question.

    Attributes:
        need: The gate's need.
        retrieved: What was decided; None in a label run, which holds both answers.
        reading: Cost of the gate's reading.
        closed: Cost of finishing the closed-book answer.
        opened: Cost of searching and answering with passages.
        loses_answer: Whether skipping gives a different answer than retrieving (in a log), or a wrong one instead of
            a right one (in a label run). None if only one answer is known.
        closed_only: Cost of the closed-book answer without any gate.
    """

    need: float
    retrieved: bool | None = None
    reading: EventCost = field(default_factory=EventCost)
    closed: EventCost = field(default_factory=EventCost)
    opened: EventCost = field(default_factory=EventCost)
    loses_answer: bool | None = None
    closed_only: EventCost = field(default_factory=EventCost)


@dataclass(frozen=True)
class SavedAmount:
    """An amount saved against always retrieving; negative if the gate costs more than it saves.

    Attributes:
        always: The amount that always retrieving takes.
    """

    saved: float
    always: float


@dataclass(frozen=True)
class ReplayResult:
    """What one threshold would have done.

    Attributes:
        retrieved: Number of questions retrieved for.
        rate: Share of questions retrieved for.
        savings: Savings by kind; None if the log does not say enough.
        risks: Share of lost answers, by how both answers are known ('retrieved', 'audited' or 'graded').
    """

    threshold: float
    retrieved: int
    rate: float
    savings: dict[str, SavedAmount | None]
    risks: dict[str, Proportion]

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Traffic:
    """Logged questions as columns."""

    events: Sequence[TrafficEvent]

    def __post_init__(self) -> None:
        if not self.events:
            raise BadInput("there is no question to replay. Log some with `knowgate ask`, as JSON.")

    @cached_property
    def needs(self) -> FloatArray:
        """Need of each question."""
        return np.array([event.need for event in self.events])

    @cached_property
    def recorded_costs(self) -> dict[str, dict[str, FloatArray]]:
        """Recorded cost per question, by stage and measure; NaN where it is unknown."""
        return {
            stage: {
                measure: np.array([getattr(getattr(event, stage), measure) for event in self.events])
                for measure in COST_MEASURES
            }
            for stage in (*COST_STAGES, CLOSED_ONLY)
        }

    @cached_property
    def costs(self) -> dict[str, dict[str, FloatArray]]:
        """Cost per question, by stage and measure. Unknown amounts are replaced by the mean of the known ones."""
        return {
            stage: {measure: _fill_with_mean(column) for measure, column in columns.items()}
            for stage, columns in self.recorded_costs.items()
        }

    def count_known(self, stage: str) -> int:
        """Count the questions whose cost of a stage is recorded in any measure."""
        return int(np.any([~np.isnan(column) for column in self.recorded_costs[stage].values()], axis=0).sum())

    @cached_property
    def checks(self) -> dict[str, tuple[FloatArray, BoolArray]]:
        """Needs and losses of the questions with both answers, by how these are known."""
        kinds = {"retrieved": True, "audited": False, "graded": None}
        checks = {}
        for name, retrieved in kinds.items():
            events = [event for event in self.events if event.loses_answer is not None and event.retrieved is retrieved]
            if events:
                losses = np.array([event.loses_answer for event in events], dtype=bool)
                checks[name] = (np.array([event.need for event in events]), losses)
        return checks


def _fill_with_mean(column: FloatArray) -> FloatArray:
    known = ~np.isnan(column)
    return np.where(known, column, column[known].mean()) if known.any() else column


def replay_traffic(traffic: Traffic, thresholds: Sequence[float], prices: Prices) -> list[ReplayResult]:
    """Replay traffic at each threshold, in ascending order."""
    return [_replay_threshold(traffic, threshold, prices) for threshold in sorted(set(thresholds))]


def _replay_threshold(traffic: Traffic, threshold: float, prices: Prices) -> ReplayResult:
    retrieve = traffic.needs > threshold
    n, n_retrieved = len(retrieve), int(retrieve.sum())
    saved = {measure: _measure_saving(traffic, measure, retrieve) for measure in COST_MEASURES}
    searches = SavedAmount(n - n_retrieved, n)
    savings = {
        "retrievals": searches,
        "tokens": _add_savings((saved["prompt"], 1.0), (saved["completion"], 1.0)),
        "seconds": saved["seconds"],
        "money": _add_savings(
            (searches, prices.search),
            (saved["prompt"], prices.input_token),
            (saved["completion"], prices.output_token),
            (saved["gpu"], prices.gpu_hour / SECONDS_PER_HOUR),
        ),
    }
    risks = {name: make_proportion((needs <= threshold) & losses) for name, (needs, losses) in traffic.checks.items()}
    return ReplayResult(threshold, n_retrieved, n_retrieved / n, savings, risks)


def make_proportion(flags: BoolArray) -> Proportion:
    """Return the share of true values with its Wilson interval."""
    hits, n = int(flags.sum()), len(flags)
    return Proportion(hits, n, hits / n, *wilson_interval(hits, n))


def _measure_saving(traffic: Traffic, measure: str, retrieve: BoolArray) -> SavedAmount | None:
    """Return what retrieving only where `retrieve` is true saves in one measure; None if unknown."""
    reading, closed, opened = (traffic.costs[stage][measure] for stage in COST_STAGES)
    always = float(opened.sum())
    gated = float((reading + np.where(retrieve, opened, closed)).sum())
    return None if math.isnan(always) or math.isnan(gated) else SavedAmount(always - gated, always)


def _add_savings(*parts: tuple[SavedAmount | None, float]) -> SavedAmount | None:
    """Add savings, each times its price. None if one that has a price is unknown, or nothing has a price."""
    saved = always = 0.0
    priced = [(saving, price) for saving, price in parts if price]
    for saving, price in priced:
        if saving is None:
            return None
        saved += saving.saved * price
        always += saving.always * price
    return SavedAmount(saved, always) if priced else None
