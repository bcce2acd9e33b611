"""Candidates for a policy, and what a policy does to graded questions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from knowgate.core.options import option
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.calibration.threshold_choice import (
    NEVER_RETRIEVE,
    NetLoss,
    SafetyLimits,
    count_net_losses,
    list_rate_thresholds,
)
from knowgate.stats.metrics import BoolArray, FloatArray

ALWAYS, NEVER, NO_ARBITER = "always", "never", ""
CONSTANT_GATES = (ALWAYS, NEVER)


class ChoiceOptions(SafetyLimits):
    """How many right answers a policy may lose, and what searches and LLM calls cost."""

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
    """A gate that a policy may use, with its cross-validated prediction for each question.

    Attributes:
        name: Name of the gate.
        needs: Probability that each question needs retrieval, predicted by models that were not trained on the question.
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
    """An arbiter that a policy may use, with its cross-validated preference for each question.

    After retrieval, an arbiter chooses between the answer without passages (closed-book) and the answer with passages.

    Attributes:
        name: Name of the arbiter.
        prefers_closed_book: For each question, whether the arbiter chooses the closed-book answer.
        models: Number of trained models behind the arbiter.
    """

    name: str
    prefers_closed_book: BoolArray = field(repr=False)
    models: int = 0


@dataclass(frozen=True)
class PolicyResult:
    """Accuracy and cost of a policy (gate, threshold and perhaps arbiter).

    Attributes:
        gate: Name of the gate.
        arbiter: Name of the arbiter; '' for none.
        threshold: The policy retrieves if the need is above it.
        searches: Share of the questions for which the policy retrieves.
        right: Share of right answers.
        llm_calls: LLM calls per question.
        loss: Number of right answers lost and gained compared with always retrieving.
        reference_loss: The same, but compared with the reference: the best policy that always retrieves, perhaps with an
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
        """Name of the gate or, with an arbiter, of both: 'fusion + rules'."""
        return f"{self.gate} + {self.arbiter}" if self.arbiter else self.gate

    @property
    def is_constant(self) -> bool:
        """Whether the gate is constant: it always or never retrieves."""
        return self.gate in CONSTANT_GATES

    def describe_violation(self, limits: SafetyLimits, reference: str) -> str:
        """Describe the first limit of lost answers that the policy exceeds.

        `limits.max_loss` limits the estimated loss, `limits.loss_bound` its worst case (upper confidence limit).

        Args:
            limits: How much accuracy the policy may lose.
            reference: Name of the policy that `reference_loss` is counted against.

        Returns:
            The first violation; '' if there is none.
        """
        for name, loss in ((ALWAYS, self.loss), (reference, self.reference_loss)):
            compared_right = self.right + loss.mean
            figures = f"{name} gives {compared_right:.1%} right answers, this policy {self.right:.1%}"
            if loss.mean > limits.max_loss + 1e-9:
                return f"{figures}: {100 * loss.mean:.1f} points less; at most {100 * limits.max_loss:g} is allowed"
            if not limits.accepts(loss):
                worst_case = 100 * loss.upper(limits.confidence)
                return (
                    f"{figures} (worst case, with {limits.confidence:.0%} confidence: {worst_case:.2f} points less; at most "
                    f"{100 * limits.loss_bound:g} are allowed)"
                )
        return ""

    def describe_extra_cost(self, prices: ChoiceOptions) -> str:
        """Warn if the policy costs more than always retrieving.

        The warning says how much a right answer must be worth.

        Returns:
            The warning; '' if the policy does not cost more.
        """
        # Per question, compared with always retrieving, which makes one search and one LLM call.
        price_of_calls = prices.price_llm_call * (self.llm_calls - 1)
        saved_on_searches = prices.price_search * (1 - self.searches)
        extra = price_of_calls - saved_on_searches
        if extra <= 1e-12:
            return ""
        gained = -self.loss.mean  # right answers per question
        if gained > 0:
            verdict = (
                "it gains right answers, not money. It pays only if a right answer is worth more than "
                f"{extra / gained:.2g}, in the currency of your prices. To save costs instead, set `price_wrong` below that."
            )
        else:
            verdict = "that does not pay, because it gains no right answers on these questions."
        return (
            f"It saves {1 - self.searches:.1%} of the searches but makes {self.llm_calls:.2f} LLM calls per question instead "
            f"of 1.00: {verdict} Prices now: a wrong answer {prices.price_wrong:g}, a search {prices.price_search:g}, an LLM "
            f"call {prices.price_llm_call:g}."
        )

    def is_safe(self, limits: SafetyLimits) -> bool:
        """Return whether both losses are within the limits."""
        return limits.accepts(self.loss) and limits.accepts(self.reference_loss)


def format_change(loss: float) -> str:
    """Describe a loss (a share of the questions) as a change of right answers: 0.012 is '1.2 points fewer right answers'."""
    return f"{abs(100 * loss):.1f} points {'fewer' if loss > 0 else 'more'} right answers"


def combine_results(results: Sequence[PolicyResult]) -> PolicyResult:
    """Combine results on different questions, such as folds, into one result.

    Shares and values are averaged, weighted by the number of questions. Losses are added up.
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
        models=0,  # not defined: the results may come from different policies
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
        closed_book_right: Whether each closed-book answer is right.
        open_book_right: Whether each open-book answer is right.
        gates: The gates, by name.
        arbiters: The arbiters, by name.
        options: Prices and limits.
        reference_arbiter: Arbiter of the reference, which always retrieves; '' for none.
    """

    closed_book_right: BoolArray
    open_book_right: BoolArray
    gates: Mapping[str, GateCandidate]
    arbiters: Mapping[str, ArbiterCandidate]
    options: ChoiceOptions
    reference_arbiter: str = NO_ARBITER

    def select(self, rows: BoolArray) -> GradedQuestions:
        """Return the questions that are marked True in `rows`, with the candidates' predictions for these questions."""
        gates = {name: replace(gate, needs=gate.needs[rows]) for name, gate in self.gates.items()}
        arbiters = {
            name: replace(arbiter, prefers_closed_book=arbiter.prefers_closed_book[rows])
            for name, arbiter in self.arbiters.items()
        }
        grades = (self.closed_book_right[rows], self.open_book_right[rows])
        return GradedQuestions(*grades, gates, arbiters, self.options, self.reference_arbiter)

    def _right_after_retrieval(self, arbiter: str) -> BoolArray:
        """Return for each question whether the final answer is right if passages are always retrieved."""
        if not arbiter:
            return self.open_book_right
        return np.where(self.arbiters[arbiter].prefers_closed_book, self.closed_book_right, self.open_book_right)

    def compute_values(self, gate: str, arbiter: str, threshold: float) -> FloatArray:
        """Return the value of a policy per question: 1 for a right answer, minus costs.

        Costs are divided by `price_wrong`, the price of a wrong answer.
        """
        retrieved = self.gates[gate].needs > threshold
        is_right = np.where(retrieved, self._right_after_retrieval(arbiter), self.closed_book_right)
        llm_calls = self._count_llm_calls(gate, arbiter, retrieved)
        cost = self.options.price_search * retrieved + self.options.price_llm_call * llm_calls
        return np.asarray(is_right - cost / self.options.price_wrong)

    def _count_llm_calls(self, gate: str, arbiter: str, searches: BoolArray | FloatArray) -> FloatArray:
        """Count the LLM calls per question: two if a draft is followed by a search, else one.

        A draft is an answer without passages. After a search, the LLM answers again, with passages.

        Args:
            gate: Name of the gate.
            arbiter: Name of the arbiter; '' for none.
            searches: For each question, whether the policy retrieves; or for each policy, the share of questions for which
                it retrieves.
        """
        needs_draft = self.gates[gate].reads_draft or bool(arbiter)
        return np.asarray(1.0 + needs_draft * searches)

    def evaluate(self, gate: str, arbiter: str, threshold: float) -> PolicyResult:
        """Measure accuracy and cost of a policy on these questions.

        Args:
            gate: Name of the gate.
            arbiter: Name of the arbiter; '' for none.
            threshold: Threshold of the gate.
        """
        return self._evaluate_all(gate, arbiter, [threshold])[0]

    def _evaluate_all(self, gate: str, arbiter: str, thresholds: Sequence[float]) -> list[PolicyResult]:
        """Measure accuracy and cost of a gate and an arbiter at several thresholds."""
        n_questions = len(self.closed_book_right)
        retrieved = self.gates[gate].needs > np.array(thresholds)[:, None]  # thresholds x questions
        is_right = np.where(retrieved, self._right_after_retrieval(arbiter), self.closed_book_right)
        right_shares = np.count_nonzero(is_right, axis=1) / n_questions
        searches = np.count_nonzero(retrieved, axis=1) / n_questions  # as shares of the questions
        llm_calls = self._count_llm_calls(gate, arbiter, searches)
        costs = self.options.price_search * searches + self.options.price_llm_call * llm_calls
        values = right_shares - costs / self.options.price_wrong  # per question; a right answer is worth 1
        n_models = self.gates[gate].models + (self.arbiters[arbiter].models if arbiter else 0)
        losses = count_net_losses(is_right, self.open_book_right)
        reference_losses = count_net_losses(is_right, self._right_after_retrieval(self.reference_arbiter))
        return [
            PolicyResult(
                gate=gate,
                arbiter=arbiter,
                threshold=threshold,
                searches=float(searches[i]),
                right=float(right_shares[i]),
                llm_calls=float(llm_calls[i]),
                loss=losses[i],
                reference_loss=reference_losses[i],
                value=float(values[i]),
                models=n_models,
            )
            for i, threshold in enumerate(thresholds)
        ]

    def evaluate_constant(self, gate: str, arbiter: str = NO_ARBITER) -> PolicyResult:
        """Evaluate a policy that always or never retrieves."""
        return self.evaluate(gate, arbiter, ALWAYS_RETRIEVE if gate == ALWAYS else NEVER_RETRIEVE)

    def evaluate_thresholds(self, gate: str, arbiter: str) -> list[PolicyResult]:
        """Evaluate a gate and an arbiter at thresholds for fixed retrieval rates."""
        thresholds = list_rate_thresholds(self.gates[gate].needs)
        return self._evaluate_all(gate, arbiter, thresholds) if thresholds else []

    def compare_values(self, policy: PolicyResult, other: PolicyResult) -> tuple[float, float]:
        """Return the gain of one policy over another per question, and its standard error."""
        values = self.compute_values(policy.gate, policy.arbiter, policy.threshold)
        gain = values - self.compute_values(other.gate, other.arbiter, other.threshold)
        return float(gain.mean()), float(gain.std() / np.sqrt(len(gain)))
