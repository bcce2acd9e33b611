"""Costs of always retrieving, never retrieving and using a gate, and the search price above which a gate pays.

`compare_traffic_costs` works on logged traffic, `estimate_gated_cost` on label runs. The numbers of searches and
generated tokens are exact; the number of passage tokens is estimated from the texts. The price and the duration of a
search are assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.core.display import UNKNOWN_AMOUNT
from knowgate.core.options import Options, option, read_options
from knowgate.core.validation import parse_toml, read_text
from knowgate.data.runs.records import TableScores
from knowgate.data.runs.table import LabelTable
from knowgate.evaluation.replay import (
    PolicyCost,
    Price,
    Prices,
    Traffic,
    measure_always_cost,
    measure_gated_cost,
    measure_never_cost,
)
from knowgate.stats.metrics import BoolArray

COST_QUESTIONS = 1_000  # questions that `knowgate cost` shows costs for
SAVINGS_QUESTIONS = 100_000  # questions that reports show savings for
DEFAULT_SEARCH_PRICE = 0.005  # US dollars; about what hosted search services charge
DEFAULT_TOKEN_PRICE = 3e-7  # US dollars; a small hosted LLM
DEFAULT_SEARCH_SECONDS = 0.3  # assumed duration of a search


def read_prices(path: Path) -> Prices:
    """Read a TOML file with the keys search, llm_call, input_token, output_token and gpu_hour, all optional."""
    return read_options(Prices, parse_toml(read_text(path), str(path)), str(path))


# --- logged traffic -------------------------------------------------------------------------------


@dataclass(frozen=True)
class CostComparison:
    """Mean costs per question of always retrieving, never retrieving and using a gate, on the same questions.

    Attributes:
        always: Cost of always retrieving.
        never: Cost of never retrieving.
        gated: Cost with the gate.
        prices: Prices of searches, LLM calls, tokens and GPU time.
    """

    always: PolicyCost
    never: PolicyCost
    gated: PolicyCost
    prices: Prices

    @property
    def policies(self) -> dict[str, PolicyCost]:
        """The three policies by name."""
        return {"always": self.always, "never": self.never, "gated": self.gated}

    @property
    def searches(self) -> float:
        """Searches per question that the gate saves."""
        return self.always.searches - self.gated.searches

    @property
    def search_money(self) -> float:
        """Price of the saved searches per question."""
        return self.searches * self.prices.search

    @property
    def extra_calls(self) -> float | None:
        """Additional LLM calls per question, compared with always retrieving. None if unknown."""
        if self.gated.calls is None or self.always.calls is None:
            return None
        return self.gated.calls - self.always.calls

    @property
    def may_call_more(self) -> bool:
        """Whether the gate may make more LLM calls than always retrieving."""
        return self.extra_calls is None or self.extra_calls > 0

    @property
    def money(self) -> float | None:
        """Money saved per question, compared with always retrieving. Negative means extra cost, None means unknown."""
        always_money, gated_money = self.always.money(self.prices), self.gated.money(self.prices)
        if always_money is not None and gated_money is not None:
            return always_money - gated_money
        # If the cost of the LLM is unknown, but it is called no more often, at least the searches are saved.
        return None if self.may_call_more else self.search_money

    @property
    def pays(self) -> bool:
        """Whether the gate is known to save money."""
        return self.money is not None and self.money > 0

    @property
    def break_even(self) -> float | None:
        """Break-even price of a search, compared with always retrieving. None if unknown."""
        always_money = self.always.money_without_searches(self.prices)
        gated_money = self.gated.money_without_searches(self.prices)
        has_unpriced_calls = self.may_call_more and not self.prices.include_llm
        if always_money is None or gated_money is None or has_unpriced_calls or self.searches <= 0:
            return None
        return max(0.0, (gated_money - always_money) / self.searches)

    @property
    def break_even_call(self) -> float | None:
        """Price of an LLM call at which the gate costs the same as always retrieving."""
        if self.extra_calls is None or self.extra_calls <= 0:
            return None
        return self.search_money / self.extra_calls

    def to_dict(self) -> dict[str, Any]:
        """Return the savings of the gate as plain data, for JSON.

        Returns:
            The saved searches, the extra LLM calls and the saved money, all for `SAVINGS_QUESTIONS` questions; and the price
            of one LLM call below which the gate saves money (`break_even_llm_call`). Unknown values are None.
        """
        per_question = {"searches": self.searches, "extra_llm_calls": self.extra_calls, "money": self.money}
        totals = {name: None if value is None else SAVINGS_QUESTIONS * value for name, value in per_question.items()}
        return {"questions": SAVINGS_QUESTIONS, **totals, "break_even_llm_call": self.break_even_call}


def compare_traffic_costs(traffic: Traffic, threshold: float, prices: Prices) -> CostComparison:
    """Compare the costs of always retrieving, never retrieving and using a gate on logged traffic.

    Args:
        traffic: Logged questions.
        threshold: The gate retrieves for questions whose need, a score from 0 to 1, is above it.
        prices: Prices of searches, tokens and GPU time.
    """
    gated = measure_gated_cost(traffic, traffic.needs > threshold)
    return CostComparison(measure_always_cost(traffic), measure_never_cost(traffic), gated, prices)


# --- label runs -----------------------------------------------------------------------------------


class CostAssumptions(Options):
    """Assumed prices in dollars, and assumed duration of a search. Recorded answers do not contain them."""

    price_search: Price = option(
        DEFAULT_SEARCH_PRICE, "Price of one search in dollars. The report computes savings from it."
    )
    price_token: Price = option(
        DEFAULT_TOKEN_PRICE, "Price of one token that the LLM reads or writes. The report computes savings from it."
    )
    price_llm_call: Price | None = option(
        None, "Price of one LLM call. Use it instead of `price_token` if the rows hold no texts of passages."
    )
    search_seconds: Price = option(
        DEFAULT_SEARCH_SECONDS, "Duration of a search in seconds. The time that the gate saves is computed from it."
    )

    @property
    def prices(self) -> Prices:
        """The price of a search and, if it is known, of an LLM call or of a token."""
        if self.price_llm_call is not None:
            return Prices(search=self.price_search, llm_call=self.price_llm_call)
        if self.price_token == 0:  # the price of the LLM is unknown
            return Prices(search=self.price_search)
        return Prices(search=self.price_search, token=self.price_token)


def estimate_gated_cost(
    table: LabelTable, skips: BoolArray, gate: TableScores | None, *, has_arbiter: bool = False
) -> PolicyCost:
    """Estimate the mean cost per question if some searches are skipped.

    Of each prompt, only the tokens of the passages are counted.

    Args:
        table: Labeled questions.
        skips: Whether the search for each question is skipped.
        gate: The gate that decides, whose drafts and samples cost tokens; None if no gate decides.
        has_arbiter: Whether an arbiter chooses between the answers with and without passages, so that every question
            with a search needs both.
    """
    search_rate = float((~skips).mean())
    # A draft is an answer without passages. A question with a draft and a search is therefore answered twice.
    has_draft = has_arbiter or (gate is not None and gate.drafts)
    answer_tokens = _count_answer_tokens(table, skips, has_draft=has_draft)
    gate_tokens = gate.extra_tokens if gate else 0.0  # of the gate's own calls, such as samples
    passage_tokens = np.where(skips, 0, table.passage_tokens)
    return PolicyCost(
        searches=search_rate,
        prompt=float(passage_tokens.mean()) if table.passage_tokens.any() else None,
        completion=float(answer_tokens.mean()) + gate_tokens if table.has_answer_lengths else None,
        calls=1 + (gate.calls if gate else 0.0) + (search_rate if has_draft else 0.0),
        decision_seconds=gate.seconds if gate else 0.0,
    )


def _count_answer_tokens(table: LabelTable, skips: BoolArray, *, has_draft: bool) -> NDArray[Any]:
    """Count the tokens of the answers to each question. With a draft, a question has two answers after a search."""
    # If a search found no passages, the closed-book answer is given.
    after_search = np.where(table.has_open_book_answer, table.open_book_tokens, table.closed_book_tokens)
    if has_draft:
        after_search = after_search + table.closed_book_tokens
    return np.where(skips, table.closed_book_tokens, after_search)


# --- texts ----------------------------------------------------------------------------------------


def describe_prices(assumptions: CostAssumptions) -> str:
    """Describe the prices, such as '$0.005 a search (assumed) and $0.30 a million tokens (your price)'."""
    given = assumptions.model_fields_set
    search = f"{format_price(assumptions.price_search)} a search"
    search += " (your price)" if "price_search" in given else " (assumed)"
    if assumptions.price_llm_call is not None:
        return f"{search} and {format_price(assumptions.price_llm_call)} an LLM call (your price)"
    tokens = f"{format_price(1e6 * assumptions.price_token)} a million tokens"
    tokens += " (your price)" if "price_token" in given else " (assumed)"
    return f"{search} and {tokens}"


def format_money(amount: float | None) -> str:
    """Format an amount of money in dollars, without cents if it is large."""
    if amount is None:
        return UNKNOWN_AMOUNT
    digits = f"{abs(amount):,.0f}" if abs(amount) >= 100 else f"{abs(amount):,.2f}"
    is_negative = amount < 0 and digits != "0.00"
    return f"-${digits}" if is_negative else f"${digits}"


def format_price(price: float | None) -> str:
    """Format the price of one search, call or token in dollars: '$0.50', '$0.005' or '$0.0000003'."""
    if price is None:
        return UNKNOWN_AMOUNT
    if price == 0 or price >= 0.1:
        return f"${price:,.2f}"
    if price >= 0.0001:
        return f"${price:.3g}"
    return f"${price:.8f}".rstrip("0")
