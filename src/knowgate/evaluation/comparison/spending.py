"""What a gate saves against always retrieving: searches, tokens, money and seconds, at prices that are given.

Searches and generated tokens come from the rows. Tokens of passages are estimated from their texts where the rows hold
them, else left out. How long a search takes and what it costs are assumptions, and are shown as such.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from knowgate.errors import BadSetting
from knowgate.evaluation.comparison.gate_results import GateResult
from knowgate.evaluation.traffic.costing import break_even_price
from knowgate.runs import Trial
from knowgate.statistics import Bools, Floats

PER = 100_000  # questions that savings are told for
PRICE_SEARCH = 0.005  # of a hosted search, in dollars: about what such services charge
PRICE_TOKEN = 3e-7  # of a small hosted LLM, in dollars
SEARCH_SECONDS = 0.3


@dataclass(frozen=True)
class Assumed:
    """What the rows do not say. Prices in any currency; token: one that the LLM reads or writes."""

    price_search: float = PRICE_SEARCH
    price_token: float = PRICE_TOKEN
    search_seconds: float = SEARCH_SECONDS

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise BadSetting(f"--{name.replace('_', '-')} is {value}; it must be a number, 0 or more.")


@dataclass(frozen=True)
class Spending:
    """Per question. read: tokens of passages, None where the rows hold no texts; written: of answers, as well.

    decision: seconds, None: not timed.
    """

    searches: float
    read: float | None
    written: float | None
    decision: float | None = 0.0

    def money(self, assumed: Assumed) -> float:
        tokens = (self.read or 0.0) + (self.written or 0.0)
        return self.searches * assumed.price_search + tokens * assumed.price_token

    def break_even(self, always: Spending, assumed: Assumed) -> float | None:
        """The price of a search above which this is cheaper than always retrieving."""
        free = replace(assumed, price_search=0.0)
        return break_even_price(always.money(free), self.money(free), always.searches - self.searches)

    def seconds(self, assumed: Assumed) -> float:
        """Of searching and deciding; the answer itself is not in it."""
        return self.searches * assumed.search_seconds + (self.decision or 0.0)


def spend_always(trial: Trial) -> Spending:
    written = _mean(_opened(trial)) if trial.has_lengths else None
    return Spending(1.0, _mean(passage_tokens(trial)), written)


def spend_never(trial: Trial) -> Spending:
    """Every question from memory, with no gate."""
    return spend_gated(trial, np.ones(len(trial.rows), dtype=bool), None)


def spend_gated(trial: Trial, skips: Bools, gate: GateResult | None) -> Spending:
    """What retrieving for all but these questions takes; gate: None for one that reads nothing, as never does."""
    drafts, extra = (gate.drafts, gate.extra_tokens) if gate else (False, 0.0)
    drafted = trial.closed_tokens() * drafts
    written = np.where(skips, trial.closed_tokens(), drafted + _opened(trial)).mean() + extra
    read = passage_tokens(trial)
    return Spending(
        float((~skips).mean()),
        None if read is None else float((read * ~skips).mean()),
        float(written) if trial.has_lengths else None,
        gate.cost.seconds if gate else 0.0,
    )


def passage_tokens(trial: Trial) -> Floats | None:
    """Of the passages that each question is answered with; None where no row holds their texts."""
    return trial.passage_lengths if trial.passage_lengths.any() else None


def _opened(trial: Trial) -> Floats:
    """Tokens of the answer with passages; without any, of the other one."""
    return np.where(trial.opened, trial.open_tokens(), trial.closed_tokens())


def _mean(values: Floats | None) -> float | None:
    return None if values is None else float(values.mean())
