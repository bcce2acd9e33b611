"""Candidates for a policy, and what a policy does to graded questions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.core.options import option
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.calibration.threshold_choice import (
    NEVER_RETRIEVE,
    NetLoss,
    SafetyLimits,
    list_rate_thresholds,
)
from knowgate.stats.metrics import BoolArray, FloatArray

ALWAYS, NEVER, NO_ARBITER = "always", "never", ""
CONSTANT_GATES = (ALWAYS, NEVER)
N_PATTERNS = 16  # of four answers to a question, which are right or wrong


class ChoiceOptions(SafetyLimits):
    """Limits for the right answers that a policy may lose, and prices of searches, LLM calls and wrong answers."""

    price_search: float = option(
        0.05,
        "Price of one search, in the currency of `price_wrong`. With 0.05 and a `price_wrong` of 1, searches pay if "
        "they correct more than 5 of 100 answers.",
        ge=0,
    )
    price_llm_call: float = option(0.005, "Price of one LLM call, in the currency of `price_wrong`.", ge=0)
    price_wrong: float = option(1.0, "Price of a wrong answer.", gt=0)


@dataclass(frozen=True)
class GateCandidate:
    """A gate that may be chosen for the policy, with predictions for questions that it was not trained on.

    Attributes:
        name: Name of the gate.
        needs: How likely each question needs retrieval, from 0 to 1, predicted by models that were not trained on it.
        reads_draft: Whether the gate reads an answer without passages (the draft) to decide. If it then decides to
            retrieve, the question costs a second LLM call, for the answer with passages.
        models: Number of trained models behind the gate.
    """

    name: str
    needs: FloatArray = field(repr=False)
    reads_draft: bool = True
    models: int = 0


@dataclass(frozen=True)
class ArbiterCandidate:
    """An arbiter that may be part of the policy, and what it chooses for each question.

    After retrieval, an arbiter chooses between the closed-book answer (without passages) and the open-book answer. Here it
    has chosen for questions that it was not trained on.

    Attributes:
        name: Name of the arbiter.
        takes_closed: For each question, whether it chooses the closed-book answer.
        models: Number of trained models behind the arbiter.
    """

    name: str
    takes_closed: BoolArray = field(repr=False)
    models: int = 0


@dataclass(frozen=True)
class PolicyResult:
    """Accuracy and cost of a policy (a gate, a threshold and perhaps an arbiter), measured on graded questions.

    Attributes:
        gate: Name of the gate.
        arbiter: Name of the arbiter; '' for none.
        threshold: The policy retrieves if the need is above it.
        searches: Share of the questions that it retrieves for.
        right: Share of right answers.
        llm_calls: LLM calls per question.
        loss: Number of right answers lost and gained compared with always retrieving.
        reference_loss: The same compared with the reference: the best policy that always retrieves, perhaps with an
            arbiter.
        value: Right answers minus the price of searches and LLM calls, per question.
        models: Number of trained models behind the policy.
    """

    gate: str
    arbiter: str
    threshold: float
    searches: float
    right: float
    llm_calls: float
    loss: NetLoss
    reference_loss: NetLoss
    value: float
    models: int = 0

    @property
    def name(self) -> str:
        """Name of the gate, followed by that of the arbiter if there is one."""
        return f"{self.gate} + {self.arbiter}" if self.arbiter else self.gate

    @property
    def is_constant(self) -> bool:
        """Whether the gate is constant: it always or never retrieves."""
        return self.gate in CONSTANT_GATES

    def describe_violation(self, limits: SafetyLimits, reference: str) -> str:
        """Say which limit of lost right answers the policy exceeds.

        The answers are counted against always retrieving and against the reference. Both the estimated loss and its worst
        case have a limit.

        Args:
            limits: How much the policy may lose.
            reference: Name of the policy that `reference_loss` is counted against.

        Returns:
            The first violation; '' if there is none.
        """
        for name, loss in ((ALWAYS, self.loss), (reference, self.reference_loss)):
            figures = f"{name} gives {self.right + loss.mean:.1%} right answers, this policy {self.right:.1%}"
            if loss.mean > limits.max_loss + 1e-9:
                return f"{figures}: {100 * loss.mean:.1f} points less; at most {100 * limits.max_loss:g} is allowed"
            if not limits.accepts(loss):
                worst = (
                    f"worst case, with {limits.confidence:.0%} confidence: {100 * loss.upper(limits.confidence):.2f}"
                )
                return f"{figures} ({worst} points less; at most {100 * limits.loss_bound:g} are allowed)"
        return ""

    def describe_extra_cost(self, prices: ChoiceOptions) -> str:
        """Warn if the policy costs more than always retrieving, because it makes more LLM calls.

        The warning says how much a right answer must be worth for the policy to pay.

        Returns:
            The warning; '' if the policy does not cost more.
        """
        # Per question, compared with always retrieving, which makes one search and one LLM call.
        extra = prices.price_llm_call * (self.llm_calls - 1) - prices.price_search * (1 - self.searches)
        if extra <= 1e-12:
            return ""
        pays = "that does not pay, because it gains no right answers on these questions."
        if self.loss.mean < 0:
            worth = f"{extra / -self.loss.mean:.2g}, in the currency of your prices"
            pays = f"it gains right answers, not money. It pays only if a right answer is worth more than {worth}. To save "
            pays += "costs instead, set `price_wrong` below that."
        return (
            f"It saves {1 - self.searches:.1%} of the searches but makes {self.llm_calls:.2f} LLM calls per question instead "
            f"of 1.00: {pays} Prices now: a wrong answer {prices.price_wrong:g}, a search {prices.price_search:g}, an LLM "
            f"call {prices.price_llm_call:g}."
        )

    def is_safe(self, limits: SafetyLimits) -> bool:
        """Return whether both losses are within the limits."""
        return limits.accepts(self.loss) and limits.accepts(self.reference_loss)


def format_change(loss: float) -> str:
    """Say how a loss, as a share of the questions, changes right answers: '1.2 points fewer right answers'."""
    return f"{abs(100 * loss):.1f} points {'fewer' if loss > 0 else 'more'} right answers"


def combine_results(results: Sequence[PolicyResult]) -> PolicyResult:
    """Combine results on different questions, such as those of the folds, into one result on all of them.

    Rates are averaged with the number of questions as weight, counts are added up, and names are joined by commas.
    """
    n_questions = np.array([result.loss.n for result in results])
    weights = n_questions / n_questions.sum()
    names = ("threshold", "searches", "right", "llm_calls", "value")
    averages = {name: float(weights @ [getattr(result, name) for result in results]) for name in names}
    return PolicyResult(
        gate=", ".join(sorted({result.gate for result in results})),
        arbiter=", ".join(sorted({result.arbiter for result in results} - {NO_ARBITER})),
        loss=add_losses(result.loss for result in results),
        reference_loss=add_losses(result.reference_loss for result in results),
        models=0,
        **averages,
    )


def add_losses(losses: Iterable[NetLoss]) -> NetLoss:
    """Add up losses that were counted on different questions."""
    items = list(losses)
    return NetLoss(sum(item.lost for item in items), sum(item.gained for item in items), sum(item.n for item in items))


@dataclass(frozen=True)
class GradedQuestions:
    """Graded questions and the candidates' predictions for them.

    Attributes:
        closed_right: Whether each closed-book answer is right.
        open_right: Whether each open-book answer is right.
        gates: The gates, by name.
        arbiters: The arbiters, by name.
        options: Prices and limits.
        reference_arbiter: Arbiter of the reference, which always retrieves; '' for none.
    """

    closed_right: BoolArray
    open_right: BoolArray
    gates: Mapping[str, GateCandidate]
    arbiters: Mapping[str, ArbiterCandidate]
    options: ChoiceOptions
    reference_arbiter: str = NO_ARBITER

    def select(self, rows: BoolArray) -> GradedQuestions:
        """Return the questions that `rows` marks as True."""
        gates = {name: replace(gate, needs=gate.needs[rows]) for name, gate in self.gates.items()}
        arbiters = {name: replace(item, takes_closed=item.takes_closed[rows]) for name, item in self.arbiters.items()}
        closed, opened = self.closed_right[rows], self.open_right[rows]
        return replace(self, closed_right=closed, open_right=opened, gates=gates, arbiters=arbiters)

    def answer_right(self, gate: str, arbiter: str, threshold: float) -> BoolArray:
        """Return which questions a policy answers right."""
        retrieved = self.gates[gate].needs > threshold
        return np.where(retrieved, self._answer_retrieved_right(arbiter), self.closed_right)

    def _answer_retrieved_right(self, arbiter: str) -> BoolArray:
        """Return which questions would be answered right if all were retrieved for.

        With an arbiter, it chooses between the answers with and without passages. '' stands for no arbiter.
        """
        if not arbiter:
            return self.open_right
        return np.where(self.arbiters[arbiter].takes_closed, self.closed_right, self.open_right)

    def compute_values(self, gate: str, arbiter: str, threshold: float) -> FloatArray:
        """Return the value of a policy for each question: 1 for a right answer or 0, minus the cost of searches and calls.

        The cost is divided by `price_wrong`, the price of a wrong answer, so that both have the same unit.
        """
        retrieved = self.gates[gate].needs > threshold
        llm_calls = self._count_llm_calls(gate, arbiter, retrieved)
        cost = self.options.price_search * retrieved + self.options.price_llm_call * llm_calls
        return np.asarray(self.answer_right(gate, arbiter, threshold) - cost / self.options.price_wrong)

    def _count_llm_calls(self, gate: str, arbiter: str, searches: Any) -> Any:
        """Count the LLM calls of a policy per question: one, or two if a draft is written before a search.

        A draft is an answer without passages, which some gates and all arbiters read. If no search follows, the draft is
        the answer, and no second call is needed.

        Args:
            gate: Name of the gate.
            arbiter: Name of the arbiter; '' for none.
            searches: Whether each question is retrieved for, or the share of questions that are.
        """
        needs_draft = self.gates[gate].reads_draft or bool(arbiter)
        return 1.0 + needs_draft * searches

    def evaluate(self, gate: str, arbiter: str, threshold: float) -> PolicyResult:
        """Measure accuracy and cost of a policy on these questions.

        The policy retrieves if the gate's need is above the threshold. Then the arbiter, if any, chooses between the
        answers with and without passages.

        Args:
            gate: Name of the gate.
            arbiter: Name of the arbiter; '' for none.
            threshold: Threshold of the gate.
        """
        return self._evaluate_at(gate, arbiter, [threshold])[0]

    def evaluate_constant(self, gate: str, arbiter: str = NO_ARBITER) -> PolicyResult:
        """Evaluate a policy that always or never retrieves."""
        return self.evaluate(gate, arbiter, ALWAYS_RETRIEVE if gate == ALWAYS else NEVER_RETRIEVE)

    def evaluate_thresholds(self, gate: str, arbiter: str) -> list[PolicyResult]:
        """Evaluate a gate with an arbiter at several thresholds, which lead to fixed retrieval rates."""
        return self._evaluate_at(gate, arbiter, list_rate_thresholds(self.gates[gate].needs))

    def _evaluate_at(self, gate: str, arbiter: str, thresholds: Sequence[float]) -> list[PolicyResult]:
        """Evaluate a gate with an arbiter at sorted thresholds. The questions are counted once for all of them."""
        answers = [self._answer_retrieved_right(name) for name in (arbiter, NO_ARBITER, self.reference_arbiter)]
        pattern = sum(right.astype(np.int64) << bit for bit, right in enumerate([self.closed_right, *answers]))
        n_below = np.searchsorted(thresholds, self.gates[gate].needs, side="left")  # thresholds that lead to retrieval
        n_cells = (len(thresholds) + 1) * N_PATTERNS
        counts = np.bincount(n_below * N_PATTERNS + pattern, minlength=n_cells).reshape(-1, N_PATTERNS)
        skipped = np.cumsum(counts, axis=0)[:-1]  # thresholds x patterns
        retrieved = counts.sum(axis=0) - skipped
        closed, policy, *others = (
            np.arange(N_PATTERNS) >> bit & 1 for bit in range(4)
        )  # answers right in each pattern

        def count_losses(other: NDArray[np.int64]) -> list[NetLoss]:
            """Count the questions that are lost and gained at each threshold against other answers."""
            lost = skipped @ (other * (1 - closed)) + retrieved @ (other * (1 - policy))
            gained = skipped @ (closed * (1 - other)) + retrieved @ (policy * (1 - other))
            return [NetLoss(*both, n) for both in zip(lost.tolist(), gained.tolist(), strict=True)]

        n = len(self.closed_right)
        searches, right = retrieved.sum(axis=1) / n, (skipped @ closed + retrieved @ policy) / n
        llm_calls = self._count_llm_calls(gate, arbiter, searches)
        costs = self.options.price_search * searches + self.options.price_llm_call * llm_calls
        values = right - costs / self.options.price_wrong
        models = self.gates[gate].models + (self.arbiters[arbiter].models if arbiter else 0)
        shares = (column.tolist() for column in (searches, right, llm_calls))
        columns = zip(thresholds, *shares, *map(count_losses, others), values.tolist(), strict=True)
        return [PolicyResult(gate, arbiter, *(*figures, models)) for figures in columns]

    def compare_values(self, policy: PolicyResult, other: PolicyResult) -> tuple[float, float]:
        """Return by how much a policy is worth more than another one per question, and the standard error of this mean."""
        values = self.compute_values(policy.gate, policy.arbiter, policy.threshold)
        gain = values - self.compute_values(other.gate, other.arbiter, other.threshold)
        return float(gain.mean()), float(gain.std() / np.sqrt(len(gain)))
