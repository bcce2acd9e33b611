"""Replay of logged traffic at other thresholds: what each would have saved and risked.

If you always retrieve, every question costs a search and an answer with passages (open-book). With a gate, every
question first costs the gate's reading of it. After that, it costs either the open-book answer or the rest of the
answer without passages (closed-book). A log records one of these two costs. The other is estimated by the mean of the
questions that have it. If no question has it, the saving is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from knowgate.core.options import Options, option
from knowgate.errors import BadInput
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.stats.proportions import Proportion, wilson_interval

COST_MEASURES = ("seconds", "prompt", "completion", "gpu")
COST_STAGES = ("reading", "closed", "opened")  # attributes of TrafficEvent that hold the costs of a gated question
CLOSED_ONLY = "closed_only"  # attribute of TrafficEvent that holds the cost of answering without a gate
SECONDS_PER_HOUR = 3_600
UNKNOWN_AMOUNT = math.nan
MIN_KNOWN_QUESTIONS = 100  # with fewer answers to compare, the risk of a threshold is not shown

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Prices(Options):
    """Prices of searches, tokens and GPU time, all in the same currency. A price of 0 leaves the cost out."""

    search: Price = option(0.0, "Price of one search.", flag_name="price-search")
    token: Price | None = option(
        None, "Price of one token that the LLM reads or writes, e.g. 3e-7.", flag_name="price-token"
    )
    input_token: Price = option(
        0.0, "Price of one token of a prompt, if it differs from `token`.", flag_name="price-input-token"
    )
    output_token: Price = option(
        0.0, "Price of one token that the LLM generates, if it differs from `token`.", flag_name="price-output-token"
    )
    llm_call: Price = option(
        0.0,
        "Price of one call of the LLM. Use it instead of token prices if a log holds no tokens.",
        flag_name="price-llm-call",
    )
    gpu_hour: Price = option(
        0.0,
        "Price of one GPU hour of the LLM. Use it instead of token prices if you host the LLM.",
        flag_name="price-gpu-hour",
    )

    @model_validator(mode="before")
    @classmethod
    def _set_both_token_prices(cls, values: Any) -> Any:
        """Use the price of a token for prompts and for generated tokens, unless they have prices of their own."""
        if not isinstance(values, dict) or values.get("token") is None:
            return values
        both = {"input_token": values["token"], "output_token": values["token"]}
        return {**both, **{name: value for name, value in values.items() if name != "token"}}

    @property
    def are_given(self) -> bool:
        """Whether any price is above 0."""
        return any(self.to_dict().values())

    @property
    def include_llm(self) -> bool:
        """Whether a price of the LLM was given, if only 0. Without one, the cost of the LLM is unknown."""
        return bool(self.model_fields_set - {"search"})

    def to_dict(self) -> dict[str, float]:
        """Convert to plain data, with the keys that `replay` and `cost` print; `llm_call` only if it was given."""
        prices = {
            "retrieval": self.search,
            "input_token": self.input_token,
            "output_token": self.output_token,
            "gpu_hour": self.gpu_hour,
        }
        return prices | ({"llm_call": self.llm_call} if "llm_call" in self.model_fields_set else {})


@dataclass(frozen=True, slots=True)
class EventCost:
    """Cost of one stage of answering a question. Unknown amounts are NaN.

    Attributes:
        seconds: Elapsed time.
        prompt: Number of tokens that the LLM reads.
        completion: Number of tokens that the LLM generates.
        gpu: Seconds that the LLM computes, without searches.
    """

    seconds: float = UNKNOWN_AMOUNT
    prompt: float = UNKNOWN_AMOUNT
    completion: float = UNKNOWN_AMOUNT
    gpu: float = UNKNOWN_AMOUNT


@dataclass(frozen=True, slots=True)
class TrafficEvent:
    """One logged question.

    Attributes:
        need: Need for retrieval that the gate computed (0 = the LLM knows, 1 = retrieve).
        retrieved: Whether the gate retrieved. None in a label run, where every question is answered both ways.
        reading: Cost of what the gate reads to decide, such as a draft answer.
        closed: Cost of finishing the closed-book answer after skipping the search.
        opened: Cost of searching and answering with passages.
        loses_answer: In a log, whether the answer without passages differs from the one with passages. In a label run,
            whether it is wrong while the one with passages is correct. None if only one answer is known.
        closed_only: Cost of the closed-book answer if there is no gate.
        extra_calls: LLM calls of the gate besides the draft, such as samples.
        has_draft: Whether an answer is drafted before the decision. None if only the tokens of `reading` show it.
        right: Three grades, in a label run only: of the answer without passages, of the one with passages, and of the one
            that is given after a search, which an arbiter may choose. None if unknown.
    """

    need: float
    retrieved: bool | None = None
    reading: EventCost = field(default_factory=EventCost)
    closed: EventCost = field(default_factory=EventCost)
    opened: EventCost = field(default_factory=EventCost)
    loses_answer: bool | None = None
    closed_only: EventCost = field(default_factory=EventCost)
    extra_calls: float = 0.0
    has_draft: bool | None = None
    right: tuple[bool, bool, bool] | None = None


@dataclass(frozen=True)
class SavedAmount:
    """An amount saved, compared with always retrieving.

    Attributes:
        saved: The amount saved; negative if the gate costs more than it saves.
        always: The amount that always retrieving takes.
    """

    saved: float
    always: float


@dataclass(frozen=True)
class ReplayResult:
    """What a gate would have saved and risked at one threshold.

    Attributes:
        threshold: The gate retrieves if need is above it.
        retrieved: Number of questions that the gate retrieves for.
        rate: Share of questions that the gate retrieves for.
        savings: Savings by kind: 'retrievals', 'tokens', 'seconds', 'money'. None if the log records too little.
        risks: Share of answers that skipping would change or lose, by how both answers are known: 'retrieved' (the
            gate drafted an answer and then retrieved), 'audited' (skipped, and answered with passages as a check) or
            'graded' (label run). The shares are None if `has_evidence` is false.
        known: Number of skipped questions with both answers.
        has_evidence: Whether enough questions have both answers to say what the threshold risks: at least
            MIN_KNOWN_QUESTIONS of those it skips, and as many (or all) of those that it skips and the log retrieved
            for. Always true for label runs, where all answers are known.
    """

    threshold: float
    retrieved: int
    rate: float
    savings: dict[str, SavedAmount | None]
    risks: dict[str, Proportion]
    known: int = 0
    has_evidence: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Traffic:
    """Logged questions, with their needs for retrieval and their costs as arrays.

    Raises:
        BadInput: There are no questions.
    """

    events: Sequence[TrafficEvent]

    def __post_init__(self) -> None:
        if not self.events:
            raise BadInput("the log contains no questions to replay. Log some with `knowgate ask` and JSON output.")

    @cached_property
    def needs(self) -> FloatArray:
        """Need of each question."""
        return np.array([event.need for event in self.events])

    @cached_property
    def recorded_costs(self) -> dict[str, dict[str, FloatArray]]:
        """Recorded cost per question, by stage and measure; NaN where it is unknown."""
        recorded = {}
        for stage in (*COST_STAGES, CLOSED_ONLY):
            costs = [getattr(event, stage) for event in self.events]
            recorded[stage] = {
                measure: np.array([getattr(cost, measure) for cost in costs]) for measure in COST_MEASURES
            }
        return recorded

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
        """Needs, and whether skipping loses the answer, of the questions whose answers both ways are known.

        The key says how they are known: 'retrieved' (the gate drafted an answer, then retrieved), 'audited' (skipped, and
        answered with passages as a check) or 'graded' (label run). Kinds without questions are missing.
        """
        kinds = {"retrieved": True, "audited": False, "graded": None}  # values of TrafficEvent.retrieved
        checks = {}
        for name, retrieved in kinds.items():
            events = [event for event in self.events if event.loses_answer is not None and event.retrieved is retrieved]
            if events:
                losses = np.array([event.loses_answer for event in events], dtype=bool)
                checks[name] = (np.array([event.need for event in events]), losses)
        return checks


def _fill_with_mean(column: FloatArray) -> FloatArray:
    """Replace NaN by the mean of the other values. A column of NaN only stays as it is."""
    known = ~np.isnan(column)
    return np.where(known, column, column[known].mean()) if known.any() else column


def replay_traffic(traffic: Traffic, thresholds: Sequence[float], prices: Prices) -> list[ReplayResult]:
    """Compute what each threshold would have saved and risked. Results are in ascending order of threshold."""
    return [_replay_threshold(traffic, threshold, prices) for threshold in sorted(set(thresholds))]


def _replay_threshold(traffic: Traffic, threshold: float, prices: Prices) -> ReplayResult:
    """Compute what a gate would have saved and risked if it had retrieved for needs above the threshold.

    The risk is the share of checked questions (those with both answers) that are skipped and lose the right answer. It
    is unknown if too few questions were checked.
    """
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
    has_evidence = _has_evidence(traffic, threshold)
    risks = {
        name: make_proportion((needs <= threshold) & losses, is_known=has_evidence)
        for name, (needs, losses) in traffic.checks.items()
    }
    known = sum(event.loses_answer is not None and event.need <= threshold for event in traffic.events)
    return ReplayResult(threshold, n_retrieved, n_retrieved / n, savings, risks, known, has_evidence)


def _has_evidence(traffic: Traffic, threshold: float) -> bool:
    """Return whether enough of the questions that a threshold skips have both answers to say what it risks.

    Of those that the log retrieved for, enough must have both answers, too. Label runs always have.
    """
    skipped = [event for event in traffic.events if event.need <= threshold]
    if all(event.retrieved is None for event in skipped):  # a label run, or nothing is skipped
        return True
    newly_skipped = [event for event in skipped if event.retrieved]
    n_known = sum(event.loses_answer is not None for event in skipped)
    n_newly_known = sum(event.loses_answer is not None for event in newly_skipped)
    return n_known >= MIN_KNOWN_QUESTIONS and n_newly_known >= min(MIN_KNOWN_QUESTIONS, len(newly_skipped))


def make_proportion(flags: BoolArray, *, is_known: bool = True) -> Proportion:
    """Return the share of true values with its Wilson interval. With is_known=False, only the counts are set."""
    hits, n = int(flags.sum()), len(flags)
    if not is_known:
        return Proportion(hits, n, None, None, None)
    return Proportion(hits, n, hits / n, *wilson_interval(hits, n))


def _measure_saving(traffic: Traffic, measure: str, retrieve: BoolArray) -> SavedAmount | None:
    """Return how much of one cost measure is saved by retrieving only where `retrieve` is true; None if unknown.

    Always retrieving costs the answers with passages. With a gate, each question costs the gate's reading of it, and then
    the answer with passages or the rest of the answer without them.
    """
    reading, closed, opened = (traffic.costs[stage][measure] for stage in COST_STAGES)
    always = float(opened.sum())
    gated = float((reading + np.where(retrieve, opened, closed)).sum())
    return None if math.isnan(always) or math.isnan(gated) else SavedAmount(always - gated, always)


def _add_savings(*parts: tuple[SavedAmount | None, float]) -> SavedAmount | None:
    """Add up (saving, price) pairs, each saving times its price.

    Returns:
        None if a saving whose price is not 0 is unknown, or if all prices are 0.
    """
    saved = always = 0.0
    priced = [(saving, price) for saving, price in parts if price]
    for saving, price in priced:
        if saving is None:
            return None
        saved += saving.saved * price
        always += saving.always * price
    return SavedAmount(saved, always) if priced else None
