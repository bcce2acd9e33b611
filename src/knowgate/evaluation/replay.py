"""Replay of logged traffic at other thresholds: what each would have saved and risked, at given prices.

If you always retrieve, every question costs a search and an answer with passages (open-book). With a gate, every
question first costs the gate's decision. After that, it costs either the open-book answer or the rest of the
answer without passages (closed-book). A log records one of these two costs. The other is estimated by the mean of the
questions that have it. If no question has it, the saving is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from knowgate.core.options import Options, option
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.stats.proportions import Proportion, estimate_proportion

# Attributes of TrafficEvent that hold costs.
COST_STAGES = ("decision_cost", "cost_if_skipped", "cost_if_retrieved", "cost_without_gate")
SECONDS_PER_HOUR = 3_600
MIN_KNOWN_QUESTIONS = 100  # with fewer answers to compare, the risk of a threshold is not shown

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Prices(Options):
    """Prices of searches, tokens and GPU time, in one currency. 0 leaves a cost out."""

    search: Price = option(0.0, "Price of one search.", flag_name="price-search")
    token: Price | None = option(
        None, "Price of one token that the LLM reads or writes, e.g. 3e-7.", flag_name="price-token"
    )
    input_token: Price = option(
        0.0, "Price of one prompt token. Default: the price in `token`.", flag_name="price-input-token"
    )
    output_token: Price = option(
        0.0, "Price of one generated token. Default: the price in `token`.", flag_name="price-output-token"
    )
    llm_call: Price = option(
        0.0,
        "Price of one call of the LLM. Use it instead of token prices if you pay per call or a log holds no tokens.",
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
        """Use the price of a token as the default for prompt and generated tokens."""
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
        """Whether a price of the LLM is given, even 0."""
        return bool(self.model_fields_set - {"search"})

    def to_dict(self) -> dict[str, float]:
        """Convert the prices to plain data. `llm_call` is included only if given."""
        prices = {"retrieval": self.search, **self.model_dump(include={"input_token", "output_token", "gpu_hour"})}
        if "llm_call" in self.model_fields_set:
            prices["llm_call"] = self.llm_call
        return prices


@dataclass(frozen=True)
class PolicyCost:
    """Mean cost per question of a policy, such as always retrieving. None means not recorded.

    Attributes:
        searches: Number of searches.
        prompt: Number of tokens that the LLM reads; on label runs, only those of passages.
        completion: Number of tokens that the LLM generates.
        gpu: Seconds of the LLM's GPU.
        lost: Share of questions that are answered wrong because the search is skipped. None if answers are not graded.
        calls: Number of LLM calls.
        gained: Share of questions that are answered right because the search is skipped. None if answers are not
            graded.
        seconds: Elapsed time.
        decision_seconds: Time of the gate's decision alone.
    """

    searches: float
    prompt: float | None = None
    completion: float | None = None
    gpu: float | None = None
    lost: Proportion | None = None
    calls: float | None = None
    gained: Proportion | None = None
    seconds: float | None = None
    decision_seconds: float | None = None

    @property
    def change(self) -> float | None:
        """Gained minus lost answers, as a share of the questions. None without grades."""
        return (self.gained.hits - self.lost.hits) / self.lost.n if self.gained and self.lost else None

    def money(self, prices: Prices) -> float | None:
        """Return the total cost, or None if a priced amount is unknown."""
        model_cost = self.money_without_searches(prices)
        return None if model_cost is None else self.searches * prices.search + model_cost

    def money_without_searches(self, prices: Prices) -> float | None:
        """Return the cost except that of searches, or None if an amount with a price above 0 is unknown."""
        if self.missing_amounts(prices):
            return None
        # An amount that is still None has the price 0, so it costs nothing.
        amounts = self._priced_amounts(prices).values()
        return math.fsum(amount * price for amount, price in amounts if amount is not None)

    def missing_amounts(self, prices: Prices) -> list[str]:
        """List the names of prices above 0 whose amounts are unknown."""
        return [name for name, (amount, price) in self._priced_amounts(prices).items() if price and amount is None]

    def _priced_amounts(self, prices: Prices) -> dict[str, tuple[float | None, float]]:
        """Return pairs (amount, price of one unit), by the name of the price. GPU time is counted in seconds."""
        return {
            "input_token": (self.prompt, prices.input_token),
            "output_token": (self.completion, prices.output_token),
            "gpu_hour": (self.gpu, prices.gpu_hour / SECONDS_PER_HOUR),
            "llm_call": (self.calls, prices.llm_call),
        }


PRICE_1_PER_TOKEN = Prices(token=1.0)  # at this price, the cost is the number of tokens


class EventCost(NamedTuple):
    """Cost of one stage of answering a question. Unknown amounts are NaN.

    Attributes:
        seconds: Elapsed time.
        prompt: Number of tokens that the LLM reads.
        completion: Number of tokens that the LLM generates.
        gpu: Seconds that the LLM computes, without searches.
    """

    seconds: float = math.nan
    prompt: float = math.nan
    completion: float = math.nan
    gpu: float = math.nan


class AnswerGrades(NamedTuple):
    """Whether the answers to a question of a label run are correct."""

    closed_book: bool  # the answer without passages
    open_book: bool  # the answer with passages
    given: bool  # what the user gets after a search: the answer with passages, or the one that an arbiter chooses


@dataclass(frozen=True, slots=True)
class TrafficEvent:
    """One logged question.

    Attributes:
        need: Need for retrieval that the gate computed (0 = the LLM knows, 1 = retrieve).
        retrieved: Whether the gate retrieved. None in a label run, where every question is answered both ways.
        decision_cost: Cost of what the gate reads to decide, such as a draft answer.
        cost_if_skipped: Cost after the decision to skip the search: that of finishing the answer without passages.
        cost_if_retrieved: Cost after the decision to retrieve: that of searching and answering with passages.
        loses_answer: In a log, whether the answer without passages differs from the one with passages. In a label run,
            whether the answer without passages is wrong, while the one with passages is correct. None if only one of
            the two answers is known.
        audit_failed: Whether the server tried to find out `loses_answer` and failed.
        cost_without_gate: Cost of the whole answer without passages, from the start, if no gate decides.
        extra_calls: LLM calls of the gate besides the draft, such as samples.
        has_draft: Whether the question has a draft if it is retrieved for, because the gate or the arbiter reads one.
            None if that is not recorded.
        right: Which answers are correct; None in a log, whose answers are not graded.
        is_searched_early: Whether the search began before the decision, so that skipping does not save it.
    """

    need: float
    retrieved: bool | None = None
    decision_cost: EventCost = field(default_factory=EventCost)
    cost_if_skipped: EventCost = field(default_factory=EventCost)
    cost_if_retrieved: EventCost = field(default_factory=EventCost)
    loses_answer: bool | None = None
    audit_failed: bool = False
    cost_without_gate: EventCost = field(default_factory=EventCost)
    extra_calls: float = 0.0
    has_draft: bool | None = None
    right: AnswerGrades | None = None
    is_searched_early: bool = False


@dataclass(frozen=True)
class SavedAmount:
    """How much less of something, such as money, a gate needs than always retrieving.

    Attributes:
        saved: The difference; negative if the gate needs more.
        always: The amount that always retrieving needs.
    """

    saved: float
    always: float


@dataclass(frozen=True)
class ReplayResult:
    """What a gate would have saved and risked at one threshold.

    Attributes:
        threshold: The gate retrieves for questions whose need (0 to 1) is above it.
        retrieved: Number of questions that the gate retrieves for.
        rate: Share of questions that the gate retrieves for.
        savings: What is saved compared with always retrieving: 'retrievals', 'llm_calls', 'tokens', 'seconds' and
            'money'. None if the log records too little.
        risk: Share of all questions that are skipped and then get another answer than with the search. In a log, it is a
            different answer; in a label run, a wrong one instead of a right one, which is the loss that a guarantee
            limits. Questions that rules decide on do not count. No value if `has_evidence` is false.
        known: Number of skipped questions of which both answers are recorded. The risk is estimated from them.
        has_evidence: Whether enough questions have both answers to say what the threshold risks.
    """

    threshold: float
    retrieved: int
    rate: float
    savings: dict[str, SavedAmount | None]
    risk: Estimate
    known: int = 0
    has_evidence: bool = True


@dataclass(frozen=True)
class Traffic:
    """Logged questions, with needs and costs as arrays.

    Costs are a dictionary with an array for each stage, such as 'decision_cost'. The array has a row per field of
    `EventCost`, such as 'seconds', and a column per question.

    Attributes:
        events: The questions.
    """

    events: Sequence[TrafficEvent]

    @cached_property
    def needs(self) -> FloatArray:
        """Need of each question."""
        return np.array([event.need for event in self.events])

    @cached_property
    def recorded_costs(self) -> dict[str, FloatArray]:
        """Recorded costs by stage, as an array (fields x questions); NaN if a cost is unknown."""
        return {stage: np.array([getattr(event, stage) for event in self.events]).T for stage in COST_STAGES}

    @cached_property
    def costs(self) -> dict[str, FloatArray]:
        """Costs by stage, as an array (fields x questions). The mean of the known costs replaces unknown ones."""
        return {stage: np.array(list(map(_fill_with_mean, costs))) for stage, costs in self.recorded_costs.items()}

    def count_known(self, stage: str) -> int:
        """Count the questions with any recorded cost of a stage."""
        is_known = ~np.isnan(self.recorded_costs[stage]).all(axis=0)
        return int(is_known.sum())

    @property
    def has_both_answers(self) -> bool:
        """Whether the answers with and without passages are both known for any question."""
        return any(event.loses_answer is not None for event in self.events)

    @property
    def is_graded(self) -> bool:
        """Whether the questions are those of a label run, whose answers are graded."""
        return all(event.retrieved is None for event in self.events)


def _fill_with_mean(column: FloatArray) -> FloatArray:
    """Replace NaN by the mean of the other values. A column with nothing but NaN is returned unchanged."""
    known = ~np.isnan(column)
    return np.where(known, column, column[known].mean()) if known.any() else column


def replay_traffic(traffic: Traffic, thresholds: Sequence[float], prices: Prices) -> list[ReplayResult]:
    """Compute the savings and risks of each threshold, in ascending order."""
    return [_replay_threshold(traffic, threshold, prices) for threshold in sorted(set(thresholds))]


def _replay_threshold(traffic: Traffic, threshold: float, prices: Prices) -> ReplayResult:
    """Compute the savings and the risk of a threshold on logged questions."""
    retrieve = traffic.needs > threshold
    n_retrieved = int(retrieve.sum())
    skipped = [event for event in traffic.events if -math.inf < event.need <= threshold]  # -inf: skipped by a rule
    known = [event for event in skipped if event.loses_answer is not None]
    has_evidence = _has_evidence(skipped, known)
    risk = _estimate_risk(traffic, skipped) if has_evidence else Estimate(None)
    savings = _compute_savings(traffic, retrieve, prices)
    return ReplayResult(threshold, n_retrieved, n_retrieved / len(retrieve), savings, risk, len(known), has_evidence)


def _estimate_risk(traffic: Traffic, skipped: Sequence[TrafficEvent]) -> Estimate:
    """Estimate the share of all questions that are skipped and lose their answer, with its 95 % interval.

    Both answers are known for another part of the questions that the log skipped than of those that it retrieved for.
    So the share of lost answers is estimated for each of the two groups, and weighted by the size of the group. In the
    limits of the interval, failed audits count as kept or as lost answers.
    """
    total = np.zeros(3)
    n_decided = np.isfinite(traffic.needs).sum()  # the other needs are those of rules
    for retrieved in (True, False, None):
        group = [event for event in skipped if event.retrieved is retrieved]
        share = estimate_proportion(event.loses_answer for event in group)
        low = estimate_proportion(event.loses_answer if not event.audit_failed else False for event in group).low
        high = estimate_proportion(event.loses_answer if not event.audit_failed else True for event in group).high
        if group:
            total += len(group) / n_decided * np.array([share.value, low, high], dtype=float)
    value, low, high = total.tolist()
    return Estimate(None) if math.isnan(value) else Estimate(value, low, high)  # NaN: nothing is known of a group


def _compute_savings(traffic: Traffic, retrieve: BoolArray, prices: Prices) -> dict[str, SavedAmount | None]:
    """Compute what a gate saves against always retrieving. None means unknown."""
    n = len(retrieve)
    always = measure_always_cost(traffic)
    gated = measure_gated_cost(traffic, retrieve)
    return {
        "retrievals": SavedAmount(n - round(n * gated.searches), n),
        "llm_calls": _make_saving(always.calls, gated.calls, n),
        "tokens": _make_saving(always.money(PRICE_1_PER_TOKEN), gated.money(PRICE_1_PER_TOKEN), n),
        "seconds": _make_saving(always.seconds, gated.seconds, n),
        "money": _make_saving(always.money(prices), gated.money(prices), n) if prices.are_given else None,
    }


def _has_evidence(skipped: Sequence[TrafficEvent], known: Sequence[TrafficEvent]) -> bool:
    """Return whether enough skipped questions have both answers (`known`) to measure the risk.

    Questions that the log retrieved for are newly skipped at this threshold. Of these, too, enough must have both.
    """
    is_label_run = all(event.retrieved is None for event in skipped)  # also true if nothing is skipped
    if is_label_run:
        return True  # every question has both answers
    n_newly_skipped = sum(bool(event.retrieved) for event in skipped)
    n_newly_known = sum(bool(event.retrieved) for event in known)
    has_new_evidence = n_newly_known >= min(MIN_KNOWN_QUESTIONS, n_newly_skipped)
    has_old_evidence = len(known) > n_newly_known or len(skipped) == n_newly_skipped
    return has_new_evidence and has_old_evidence and len(known) >= MIN_KNOWN_QUESTIONS


def _make_saving(always: float | None, gated: float | None, n: int) -> SavedAmount | None:
    """Return the amount saved by a gate on n questions, or None if unknown."""
    return None if always is None or gated is None else SavedAmount(n * (always - gated), n * always)


def measure_always_cost(traffic: Traffic) -> PolicyCost:
    """Measure the mean cost per question of always retrieving, without a gate."""
    retrieve = np.ones(len(traffic.events), dtype=bool)
    return _average_costs(traffic, retrieve, traffic.costs["cost_if_retrieved"], calls=1.0)


def measure_never_cost(traffic: Traffic) -> PolicyCost:
    """Measure the mean cost per question of never retrieving, without a gate."""
    retrieve = np.zeros(len(traffic.events), dtype=bool)
    return _average_costs(traffic, retrieve, traffic.costs["cost_without_gate"], calls=1.0)


def measure_gated_cost(traffic: Traffic, retrieve: BoolArray) -> PolicyCost:
    """Measure the mean cost per question with a gate. `retrieve` holds the decision on each question."""
    costs = traffic.costs
    cost_after_decision = np.where(retrieve, costs["cost_if_retrieved"], costs["cost_if_skipped"])
    calls = _count_gated_calls(traffic, retrieve)
    cost = _average_costs(traffic, retrieve, costs["decision_cost"] + cost_after_decision, calls, has_arbiter=True)
    # A search that began before the decision was made, even if the gate then decided to skip it.
    is_searched = retrieve | np.array([event.is_searched_early for event in traffic.events])
    return replace(cost, searches=float(is_searched.mean()))


def _average_costs(
    traffic: Traffic, retrieve: BoolArray, costs: FloatArray, calls: float | None, *, has_arbiter: bool = False
) -> PolicyCost:
    """Average the costs of all questions, and compare their answers with those of always retrieving.

    Args:
        traffic: The questions.
        retrieve: Whether each question is retrieved for.
        costs: Cost of each question (fields of `EventCost` x questions).
        calls: Mean number of LLM calls per question; None if unknown.
        has_arbiter: Whether an arbiter chooses the answer after a search.
    """
    means = zip(EventCost._fields, costs.mean(axis=1).tolist(), strict=True)
    known_means = {name: mean for name, mean in means if not math.isnan(mean)}
    lost, gained = _compare_answers(traffic, retrieve, has_arbiter=has_arbiter)
    return PolicyCost(searches=float(retrieve.mean()), lost=lost, calls=calls, gained=gained, **known_means)


def _count_gated_calls(traffic: Traffic, retrieve: BoolArray) -> float | None:
    """Return the mean number of LLM calls per question with a gate. A search after a draft needs a second answer."""
    has_draft = [_has_draft(event) for event in traffic.events]
    if all(is_drafted is None for is_drafted in has_draft):
        return None
    gate_calls = np.array([event.extra_calls for event in traffic.events])
    is_answered_again = retrieve & np.array(has_draft, dtype=bool)  # None counts as False
    return float((1 + gate_calls + is_answered_again).mean())


def _has_draft(event: TrafficEvent) -> bool | None:
    """Return whether a draft (answer without passages) precedes a search. None if unknown."""
    if event.has_draft is not None:
        return event.has_draft
    draft_tokens = event.decision_cost.completion
    return None if math.isnan(draft_tokens) else draft_tokens > 0


def _compare_answers(traffic: Traffic, retrieve: BoolArray, *, has_arbiter: bool) -> tuple[Proportion | None, ...]:
    """Return the shares of answers lost and gained by skipping some searches.

    Args:
        traffic: The questions.
        retrieve: Whether each question is retrieved for.
        has_arbiter: Whether an arbiter chooses one of both answers after a search. Otherwise the one with passages is
            given.

    Returns:
        (lost, gained): Lost answers would be right if all questions were retrieved for, but are wrong now. Gained answers
        are the reverse. Both are None if answers are not graded.
    """
    grades = [event.right for event in traffic.events]
    if None in grades:
        return None, None
    closed_book_right, open_book_right, given_right = np.array(grades, dtype=bool).T
    right = np.where(retrieve, given_right if has_arbiter else open_book_right, closed_book_right)
    lost = open_book_right & ~right
    gained = right & ~open_book_right
    return estimate_proportion(lost.tolist()), estimate_proportion(gained.tolist())
