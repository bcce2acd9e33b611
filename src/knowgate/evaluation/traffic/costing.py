"""What always, never and gated retrieval cost, and the price of a search at which a gate begins to pay.

Per question, from traffic that is over (see `replay`). Per question a search costs its price, the LLM the tokens it
reads and writes and the seconds of its GPU; whichever of them has a price must be on record, or the sum is not known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from knowgate.doors import parse_toml, read_text
from knowgate.errors import BadSetting
from knowgate.evaluation.traffic.replay import ALONE, HOUR, Bools, Prices, Traffic
from knowgate.statistics import Share, wilson
from knowgate.typed import read_record

PER_BILL = 1_000  # questions
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


def read_prices(path: Path) -> PriceTable:
    """A TOML file such as: search = 0.005, input_token = 3e-7, output_token = 1.2e-6, gpu_hour = 2.5, one per line."""
    where = str(path)
    table = read_record(PriceTable, parse_toml(read_text(path), where), where)
    if wrong := [item.name for item in fields(table) if not getattr(table, item.name) >= 0]:
        raise BadSetting(f"{where}: {wrong[0]} is {getattr(table, wrong[0])}; a price is a number, 0 or more.")
    return table


@dataclass(frozen=True)
class Bill:
    """One way of doing it, per question. None: not on record. gpu: seconds. lost: right answers it gives away."""

    searches: float
    prompt: float | None
    completion: float | None
    gpu: float | None
    lost: Share | None = None

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
            "gpu-hour": (self.gpu, prices.gpu_hour / HOUR),
        }

    def money(self, prices: Prices) -> float | None:
        besides = self.besides(prices)
        return None if besides is None else self.searches * prices.retrieval + besides


@dataclass(frozen=True)
class Costing:
    """Three ways of answering the same questions. threshold: that of the gate."""

    n: int
    threshold: float
    always: Bill
    never: Bill
    gated: Bill
    prices: Prices = field(default_factory=Prices)

    @property
    def break_even(self) -> float | None:
        """The price of a search at which gated costs what always does; above it, the gate is cheaper."""
        always, gated = self.always.besides(self.prices), self.gated.besides(self.prices)
        if always is None or gated is None:
            return None
        return break_even_price(always, gated, self.always.searches - self.gated.searches)


def break_even_price(always: float, gated: float, skipped: float) -> float | None:
    """From what all but the searches costs either way, and the searches saved; 0: it pays at any price, None: at none.

    p + always = (1 - skipped) p + gated, so p = (gated - always) / skipped.
    """
    return max(0.0, (gated - always) / skipped) if skipped > 0 else None


def bill_traffic(traffic: Traffic, threshold: float, prices: Prices) -> Costing:
    """All three ways, at a gate's threshold."""
    retrieve = traffic.needs > threshold
    always, never = np.ones_like(retrieve), np.zeros_like(retrieve)
    return Costing(
        len(retrieve),
        threshold,
        always=_bill(traffic, always, "opened"),
        never=_bill(traffic, never, ALONE),
        gated=_bill(traffic, retrieve, None),
        prices=prices,
    )


def _bill(traffic: Traffic, retrieve: Bools, way: str | None) -> Bill:
    """way: what every question costs; None for a gate: its reading, and then one of the two ways."""
    amounts = {name: _amount(traffic, name, retrieve, way) for name in ("prompt", "completion", "gpu")}
    return Bill(float(retrieve.mean()), **amounts, lost=_lost(traffic, retrieve))


def _amount(traffic: Traffic, measure: str, retrieve: Bools, way: str | None) -> float | None:
    if way is not None:
        found = traffic.costs[way][measure]
    else:
        read, closed, opened = (traffic.costs[name][measure] for name in ("read", "closed", "opened"))
        found = read + np.where(retrieve, opened, closed)
    mean = float(found.mean())
    return None if math.isnan(mean) else mean


def _lost(traffic: Traffic, retrieve: Bools) -> Share | None:
    """Of graded rows alone: an answer of a log that differs need not be wrong."""
    if GRADED not in traffic.checks:
        return None
    graded = [place for place, event in enumerate(traffic.events) if event.loses is not None]
    loses = traffic.checks[GRADED][1]
    hits = int((loses & ~retrieve[graded]).sum())
    return Share(hits, len(loses), hits / len(loses), *wilson(hits, len(loses)))
