"""What always, never and gated retrieval cost, and the price of a search at which a gate begins to pay.

Per question, from traffic that is over (see `replay`). Per question a search costs its price, the LLM the tokens it
reads and writes and the seconds of its GPU; whichever of them has a price must be on record, or the sum is not known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from knowgate.core.schema import read_record
from knowgate.core.validation import parse_toml, read_text
from knowgate.data.runs.table import LabelTable
from knowgate.errors import BadSetting
from knowgate.evaluation.gate_results import GateResult
from knowgate.evaluation.replay import CLOSED_ONLY, SECONDS_PER_HOUR, EventFlags, Prices, Traffic
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.stats.proportions import Proportion, wilson_interval

COST_QUESTIONS = 1_000  # questions
GRADED = "graded"


@dataclass(frozen=True)
class PriceTable:
    """Prices in one currency: of a search, of a token that the LLM reads or writes, of an hour of its GPU."""

    search: float = 0.0
    input_token: float = 0.0
    output_token: float = 0.0
    gpu_hour: float = 0.0

    @property
    def prices(self) -> Prices:
        return Prices(self.search, self.input_token, self.output_token, self.gpu_hour)


def read_price_table(path: Path) -> PriceTable:
    """A TOML file such as: search = 0.005, input_token = 3e-7, output_token = 1.2e-6, gpu_hour = 2.5, one per line."""
    where = str(path)
    table = read_record(PriceTable, parse_toml(read_text(path), where), where)
    if wrong := [item.name for item in fields(table) if not getattr(table, item.name) >= 0]:
        raise BadSetting(f"{where}: {wrong[0]} is {getattr(table, wrong[0])}; a price is a number, 0 or more.")
    return table


@dataclass(frozen=True)
class TrafficCost:
    """One way of doing it, per question. None: not on record. gpu: seconds. lost: right answers it gives away."""

    searches: float
    prompt: float | None
    completion: float | None
    gpu: float | None
    lost: Proportion | None = None

    def besides(self, prices: Prices) -> float | None:
        """What all but the searches costs; None where something that has a price is not on record."""
        parts = self._priced(prices)
        return None if self.missing(prices) else math.fsum((amount or 0.0) * price for amount, price in parts.values())

    def missing(self, prices: Prices) -> list[str]:
        """Prices of what is not on record."""
        return [name for name, (amount, price) in self._priced(prices).items() if price and amount is None]

    def _priced(self, prices: Prices) -> dict[str, tuple[float | None, float]]:
        return {
            "input-token": (self.prompt, prices.input_token),
            "output-token": (self.completion, prices.output_token),
            "gpu-hour": (self.gpu, prices.gpu_hour / SECONDS_PER_HOUR),
        }

    def money(self, prices: Prices) -> float | None:
        besides = self.besides(prices)
        return None if besides is None else self.searches * prices.retrieval + besides


@dataclass(frozen=True)
class CostComparison:
    """Three ways of answering the same questions. threshold: that of the gate."""

    n: int
    threshold: float
    always: TrafficCost
    never: TrafficCost
    gated: TrafficCost
    prices: Prices = field(default_factory=Prices)

    @property
    def break_even(self) -> float | None:
        """The price of a search at which gated costs what always does; above it, the gate is cheaper."""
        always, gated = self.always.besides(self.prices), self.gated.besides(self.prices)
        if always is None or gated is None:
            return None
        return compute_break_even_price(always, gated, self.always.searches - self.gated.searches)


def compute_break_even_price(always: float, gated: float, skipped: float) -> float | None:
    """From what all but the searches costs either way, and the searches saved; 0: it pays at any price, None: at none.

    p + always = (1 - skipped) p + gated, so p = (gated - always) / skipped.
    """
    return max(0.0, (gated - always) / skipped) if skipped > 0 else None


def compare_traffic_costs(traffic: Traffic, threshold: float, prices: Prices) -> CostComparison:
    """All three ways, at a gate's threshold."""
    retrieve = traffic.needs > threshold
    always, never = np.ones_like(retrieve), np.zeros_like(retrieve)
    return CostComparison(
        len(retrieve),
        threshold,
        always=_bill(traffic, always, "opened"),
        never=_bill(traffic, never, CLOSED_ONLY),
        gated=_bill(traffic, retrieve, None),
        prices=prices,
    )


def _bill(traffic: Traffic, retrieve: EventFlags, way: str | None) -> TrafficCost:
    """way: what every question costs; None for a gate: its reading, and then one of the two ways."""
    amounts = {name: _amount(traffic, name, retrieve, way) for name in ("prompt", "completion", "gpu")}
    return TrafficCost(float(retrieve.mean()), **amounts, lost=_lost(traffic, retrieve))


def _amount(traffic: Traffic, measure: str, retrieve: EventFlags, way: str | None) -> float | None:
    if way is not None:
        found = traffic.costs[way][measure]
    else:
        read, closed, opened = (traffic.costs[name][measure] for name in ("read", "closed", "opened"))
        found = read + np.where(retrieve, opened, closed)
    mean = float(found.mean())
    return None if math.isnan(mean) else mean


def _lost(traffic: Traffic, retrieve: EventFlags) -> Proportion | None:
    """Of graded rows alone: an answer of a log that differs need not be wrong."""
    if GRADED not in traffic.checks:
        return None
    graded = [place for place, event in enumerate(traffic.events) if event.loses is not None]
    loses = traffic.checks[GRADED][1]
    hits = int((loses & ~retrieve[graded]).sum())
    return Proportion(hits, len(loses), hits / len(loses), *wilson_interval(hits, len(loses)))


SAVINGS_QUESTIONS = 100_000  # questions that savings are told for
DEFAULT_SEARCH_PRICE = 0.005  # of a hosted search, in dollars: about what such services charge
DEFAULT_TOKEN_PRICE = 3e-7  # of a small hosted LLM, in dollars
DEFAULT_SEARCH_SECONDS = 0.3


@dataclass(frozen=True)
class CostAssumptions:
    """What the rows do not say. Prices in any currency; token: one that the LLM reads or writes."""

    price_search: float = DEFAULT_SEARCH_PRICE
    price_token: float = DEFAULT_TOKEN_PRICE
    search_seconds: float = DEFAULT_SEARCH_SECONDS

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise BadSetting(f"--{name.replace('_', '-')} is {value}; it must be a number, 0 or more.")


@dataclass(frozen=True)
class QuestionCost:
    """Per question. read: tokens of passages, None where the rows hold no texts; written: of answers, as well.

    decision: seconds, None: not timed.
    """

    searches: float
    read: float | None
    written: float | None
    decision: float | None = 0.0

    def money(self, assumed: CostAssumptions) -> float:
        tokens = (self.read or 0.0) + (self.written or 0.0)
        return self.searches * assumed.price_search + tokens * assumed.price_token

    def break_even(self, always: QuestionCost, assumed: CostAssumptions) -> float | None:
        """The price of a search above which this is cheaper than always retrieving."""
        free = replace(assumed, price_search=0.0)
        return compute_break_even_price(always.money(free), self.money(free), always.searches - self.searches)

    def seconds(self, assumed: CostAssumptions) -> float:
        """Of searching and deciding; the answer itself is not in it."""
        return self.searches * assumed.search_seconds + (self.decision or 0.0)


def estimate_always_cost(trial: LabelTable) -> QuestionCost:
    written = _mean(_opened(trial)) if trial.has_answer_lengths else None
    return QuestionCost(1.0, _mean(count_passage_tokens(trial)), written)


def estimate_never_cost(trial: LabelTable) -> QuestionCost:
    """Every question from memory, with no gate."""
    return estimate_gated_cost(trial, np.ones(len(trial.rows), dtype=bool), None)


def estimate_gated_cost(trial: LabelTable, skips: BoolArray, gate: GateResult | None) -> QuestionCost:
    """What retrieving for all but these questions takes; gate: None for one that reads nothing, as never does."""
    drafts, extra = (gate.drafts, gate.extra_tokens) if gate else (False, 0.0)
    drafted = trial.closed_tokens * drafts
    written = np.where(skips, trial.closed_tokens, drafted + _opened(trial)).mean() + extra
    read = count_passage_tokens(trial)
    return QuestionCost(
        float((~skips).mean()),
        None if read is None else float((read * ~skips).mean()),
        float(written) if trial.has_answer_lengths else None,
        gate.cost.seconds if gate else 0.0,
    )


def count_passage_tokens(trial: LabelTable) -> FloatArray | None:
    """Of the passages that each question is answered with; None where no row holds their texts."""
    return trial.passage_tokens if trial.passage_tokens.any() else None


def _opened(trial: LabelTable) -> FloatArray:
    """Tokens of the answer with passages; without any, of the other one."""
    return np.where(trial.has_open_answer, trial.open_tokens, trial.closed_tokens)


def _mean(values: FloatArray | None) -> float | None:
    return None if values is None else float(values.mean())
