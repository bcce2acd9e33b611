"""Choose gate, arbiter and threshold together, from out-of-fold predictions. Nothing is trained here.

A policy is worth its right answers minus what its searches and LLM calls cost. Each gate is combined with each arbiter
and with thresholds at fixed retrieval rates; of the settings that are safe (see `SafetyLimits`) the most valuable one is
chosen. It must beat always retrieving and never retrieving by more than one standard error, and it must still beat
them when it is chosen on some folds of the questions and applied to the others. If it does not, it is chosen again with
stricter limits, and after that the better of the two constant policies is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from knowgate.core.options import option
from knowgate.errors import BadInput
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.calibration.threshold_choice import (
    MIN_SAVING,
    NEVER_RETRIEVE,
    NetLoss,
    SafetyLimits,
    count_net_loss,
    list_rate_thresholds,
)
from knowgate.stats.metrics import BoolArray, FloatArray

ALWAYS, NEVER, NO_ARBITER = "always", "never", ""
CONSTANT_GATES = (ALWAYS, NEVER)
DEFAULT_FOLDS = 5
# The most valuable policy tends to lie at the limit of what it may lose, where it is often not safe on other questions.
# Then a policy is chosen that may lose half as much, and after that one that may lose nothing.
LOSS_SHARES = (1.0, 0.5, 0.0)
SIMPLER_MARGIN = 0.0005  # a policy with fewer models wins if it is worth at most this much less


class ChoiceOptions(SafetyLimits):
    """What a policy may lose, and what searches and LLM calls cost."""

    price_search: float = option(
        0.05,
        "Price of one search, in the currency of `price_wrong`. 0.05 with a `price_wrong` of 1: searches pay if they "
        "make more than 5 of 100 answers right that would be wrong without.",
        ge=0,
    )
    price_llm_call: float = option(0.005, "Price of one LLM call, in the currency of `price_wrong`.", ge=0)
    price_wrong: float = option(1.0, "Price of a wrong answer.", gt=0)


@dataclass(frozen=True)
class GateCandidate:
    """A gate that may become part of the policy, with its out-of-fold predictions.

    Attributes:
        name: Name of the gate.
        needs: Need for retrieval of each question, from 0 to 1, by models that did not see the question.
        reads_draft: Whether the gate reads the closed-book answer, so that a retrieved question costs a second call.
        extra_calls: LLM calls for each question beside the answers, such as samples.
        judge_calls: Calls of judge models for each question.
        models: Number of trained models behind the gate.
    """

    name: str
    needs: FloatArray = field(repr=False)
    reads_draft: bool = True
    extra_calls: float = 0.0
    judge_calls: float = 0.0
    models: int = 0


@dataclass(frozen=True)
class ArbiterCandidate:
    """An arbiter that may become part of the policy, with its out-of-fold choices.

    Attributes:
        name: Name of the arbiter.
        takes_closed: Whether it gives the closed-book answer after retrieval, for each question.
        judge_calls: Calls of judge models for each retrieved question.
        models: Number of trained models behind the arbiter.
    """

    name: str
    takes_closed: BoolArray = field(repr=False)
    judge_calls: float = 0.0
    models: int = 0


@dataclass(frozen=True)
class PolicyResult:
    """What a policy does to graded questions.

    Attributes:
        gate: Name of the gate.
        arbiter: Name of the arbiter; '' for none.
        threshold: The policy retrieves if the need is above it.
        searches: Share of the questions that it retrieves for.
        right: Share of right answers.
        llm_calls: LLM calls per question.
        judge_calls: Calls of judge models per question.
        loss: Questions lost and gained against always retrieving.
        value: Right answers minus the price of searches and LLM calls, per question.
        models: Number of trained models behind the policy.
    """

    gate: str
    arbiter: str
    threshold: float
    searches: float
    right: float
    llm_calls: float
    judge_calls: float
    loss: NetLoss
    value: float
    models: int = 0

    @property
    def name(self) -> str:
        """Name of the gate, followed by that of the arbiter if there is one."""
        return f"{self.gate} + {self.arbiter}" if self.arbiter else self.gate


@dataclass(frozen=True)
class PolicyChoice:
    """The chosen policy and what it was compared with.

    Attributes:
        chosen: The chosen policy, on the questions that it was chosen on.
        always: Always retrieving.
        never: Never retrieving.
        tried: The best safe setting of each pair of gate and arbiter, most valuable first.
        estimate: The whole choice, made on some folds and applied to the others: an honest estimate.
        reason: Why this policy was chosen, in one sentence.
        required_rows: If always retrieving was chosen because no other policy is proven safe: the number of questions
            to choose on that would prove it. None otherwise, or if no number would.
    """

    chosen: PolicyResult
    always: PolicyResult
    never: PolicyResult
    tried: Sequence[PolicyResult]
    estimate: PolicyResult
    reason: str
    required_rows: int | None = None

    @property
    def is_constant(self) -> bool:
        """Whether the gate of the policy is constant: it always or never retrieves."""
        return self.chosen.gate in CONSTANT_GATES


@dataclass(frozen=True)
class _Questions:
    """Graded questions and the candidates' predictions for them."""

    closed_right: BoolArray
    open_right: BoolArray
    gates: Mapping[str, GateCandidate]
    arbiters: Mapping[str, ArbiterCandidate]
    options: ChoiceOptions

    def select(self, rows: BoolArray) -> _Questions:
        """Return the questions that `rows` marks as True."""
        gates = {name: replace(gate, needs=gate.needs[rows]) for name, gate in self.gates.items()}
        arbiters = {
            name: replace(arbiter, takes_closed=arbiter.takes_closed[rows]) for name, arbiter in self.arbiters.items()
        }
        return _Questions(self.closed_right[rows], self.open_right[rows], gates, arbiters, self.options)

    def answer_right(self, gate: str, arbiter: str, threshold: float) -> BoolArray:
        """Return which questions a policy answers right."""
        retrieved = self.gates[gate].needs > threshold
        return np.where(retrieved, self._answer_retrieved_right(arbiter), self.closed_right)

    def _answer_retrieved_right(self, arbiter: str) -> BoolArray:
        """Return which questions are answered right after retrieval."""
        if not arbiter:
            return self.open_right
        return np.where(self.arbiters[arbiter].takes_closed, self.closed_right, self.open_right)

    def compute_values(self, gate: str, arbiter: str, threshold: float) -> FloatArray:
        """Return the value of a policy for each question: its right answer minus what it costs."""
        retrieved = self.gates[gate].needs > threshold
        cost = self.options.price_search * retrieved
        cost = cost + self.options.price_llm_call * self._count_llm_calls(gate, arbiter, retrieved)
        return self.answer_right(gate, arbiter, threshold).astype(float) - cost / self.options.price_wrong

    def _count_llm_calls(self, gate: str, arbiter: str, retrieved: BoolArray) -> FloatArray:
        """Count the LLM calls for each question: the answer, and for retrieved ones the draft if somebody reads it."""
        second_call = self.gates[gate].reads_draft or bool(arbiter)
        return np.asarray(1.0 + self.gates[gate].extra_calls + second_call * retrieved)

    def evaluate(self, gate: str, arbiter: str, threshold: float) -> PolicyResult:
        """Evaluate a policy on these questions."""
        retrieved, right = self.gates[gate].needs > threshold, self.answer_right(gate, arbiter, threshold)
        judged = self.gates[gate].judge_calls
        models = self.gates[gate].models
        if arbiter:
            judged += self.arbiters[arbiter].judge_calls * float(retrieved.mean())
            models += self.arbiters[arbiter].models
        return PolicyResult(
            gate=gate,
            arbiter=arbiter,
            threshold=threshold,
            searches=float(retrieved.mean()),
            right=float(right.mean()),
            llm_calls=float(self._count_llm_calls(gate, arbiter, retrieved).mean()),
            judge_calls=judged,
            loss=count_net_loss(right, self.open_right),
            value=float(self.compute_values(gate, arbiter, threshold).mean()),
            models=models,
        )


def choose_policy(
    gates: Sequence[GateCandidate],
    closed_right: BoolArray,
    open_right: BoolArray,
    arbiters: Sequence[ArbiterCandidate] = (),
    *,
    folds: NDArray[np.int64] | None = None,
    options: ChoiceOptions | None = None,
) -> PolicyChoice:
    """Choose gate, arbiter and threshold from out-of-fold predictions.

    The gates 'always' and 'never' and the choice of no arbiter take part without being listed.

    Args:
        gates: The gates, with needs of questions that their models did not see.
        closed_right: Whether each closed-book answer is right.
        open_right: Whether each open-book answer is right.
        arbiters: The arbiters, with choices for questions that their models did not see.
        folds: Fold of each question, for the estimate. Equal questions must share a fold. Default: five folds by
            position.
        options: Prices and limits.

    Returns:
        The choice; `apply_policy` applies it to other questions.

    Raises:
        BadInput: The predictions do not have one value per question, or there are no questions.

    Example:
        >>> known = np.array([True, False] * 200)
        >>> gate = GateCandidate("probe", np.where(known, 0.1, 0.9))
        >>> choice = choose_policy([gate], closed_right=known, open_right=np.ones(400, dtype=bool))
        >>> choice.chosen.gate, choice.chosen.searches, choice.chosen.right
        ('probe', 0.5, 1.0)
    """
    n = len(closed_right)
    _check_lengths(n, open_right, gates, arbiters)
    constants = [GateCandidate(name, np.full(n, 0.5), reads_draft=False) for name in CONSTANT_GATES]
    questions = _Questions(
        closed_right,
        open_right,
        {gate.name: gate for gate in (*constants, *gates)},
        {arbiter.name: arbiter for arbiter in arbiters},
        options or ChoiceOptions(),
    )
    fold_of_row = np.arange(n) % DEFAULT_FOLDS if folds is None else folds
    always, never = _evaluate_constants(questions)
    constant = _select_constant(questions, always, never)
    limits, failure = questions.options, ""
    for share in LOSS_SHARES:
        stricter = replace(questions, options=limits.model_copy(update={"max_loss": share * limits.max_loss}))
        tried = _try_policies(stricter)
        chosen, reason = _select(stricter, tried, always, never)
        estimate = _estimate_out_of_fold(stricter, fold_of_row)
        is_better = estimate.value > constant.value and limits.accepts(estimate.loss)
        if chosen.name not in CONSTANT_GATES and is_better:
            return PolicyChoice(chosen, always, never, tried, estimate, reason)
        if chosen.name not in CONSTANT_GATES and not failure:
            violation = (
                limits.describe_violation(estimate.loss) or "it is not worth more than to retrieve always or never"
            )
            failure = f"{chosen.name} looked best, but on questions that it was not chosen on {violation}"
            required = estimate.loss.count_required_rows(limits)
    if not failure:
        failure, required = _explain_constant(questions, constant, reason)
    return PolicyChoice(constant, always, never, _try_policies(questions), constant, failure, required)


def apply_policy(
    chosen: PolicyResult,
    needs: FloatArray,
    closed_right: BoolArray,
    open_right: BoolArray,
    takes_closed: BoolArray | None = None,
    *,
    like: GateCandidate | None = None,
    options: ChoiceOptions | None = None,
) -> PolicyResult:
    """Apply a chosen policy to other questions.

    Args:
        chosen: The policy, such as `PolicyChoice.chosen`.
        needs: Need of each question, on the scale of the candidate that was chosen; ignored for constant gates.
        closed_right: Whether each closed-book answer is right.
        open_right: Whether each open-book answer is right.
        takes_closed: The choices of the arbiter, if the policy has one.
        like: The candidate that was chosen, for its costs. Default: a gate that reads a draft.
        options: Prices.
    """
    is_constant = chosen.gate in CONSTANT_GATES
    values = np.full(len(closed_right), 0.5) if is_constant else np.asarray(needs, dtype=float)
    costs = like or GateCandidate(chosen.gate, values, reads_draft=not is_constant, models=chosen.models)
    gate = replace(costs, name=chosen.gate, needs=values)
    arbiters = {}
    if chosen.arbiter:
        if takes_closed is None:
            raise BadInput(f"the policy has the arbiter '{chosen.arbiter}'. Pass its choices as `takes_closed`.")
        arbiters[chosen.arbiter] = ArbiterCandidate(chosen.arbiter, takes_closed)
    questions = _Questions(closed_right, open_right, {gate.name: gate}, arbiters, options or ChoiceOptions())
    return questions.evaluate(chosen.gate, chosen.arbiter, chosen.threshold)


# --- selection ------------------------------------------------------------------------------------


def _try_policies(questions: _Questions) -> list[PolicyResult]:
    """Return the best safe setting of each pair of gate and arbiter, most valuable first."""
    gates = [name for name in questions.gates if name != NEVER]
    arbiters = (NO_ARBITER, *questions.arbiters)
    best = [_find_best_setting(questions, gate, arbiter) for gate in gates for arbiter in arbiters]
    return sorted((result for result in best if result is not None), key=lambda result: -result.value)


def _find_best_setting(questions: _Questions, gate: str, arbiter: str) -> PolicyResult | None:
    """Return the most valuable safe threshold of a gate with an arbiter; None if no threshold is safe."""
    if gate in CONSTANT_GATES:
        results = [questions.evaluate(gate, arbiter, _get_constant_threshold(gate))]
    else:
        thresholds = list_rate_thresholds(questions.gates[gate].needs)
        results = [questions.evaluate(gate, arbiter, threshold) for threshold in thresholds]
    is_reference = (gate, arbiter) == (ALWAYS, NO_ARBITER)
    safe = [result for result in results if is_reference or questions.options.accepts(result.loss)]
    return max(safe, key=lambda result: (result.value, -result.searches), default=None)


def _select(
    questions: _Questions, tried: Sequence[PolicyResult], always: PolicyResult, never: PolicyResult
) -> tuple[PolicyResult, str]:
    """Return the most valuable policy and why it was chosen; a constant one unless another beats it clearly."""
    constant = _select_constant(questions, always, never)
    rivals = [result for result in tried if result.name not in CONSTANT_GATES]
    if not rivals:
        return constant, "no other policy is safe and worth more"
    near = [result for result in rivals if result.value >= rivals[0].value - SIMPLER_MARGIN]
    best = min(near, key=lambda result: (result.models, -result.value))
    gain = questions.compute_values(best.gate, best.arbiter, best.threshold) - questions.compute_values(
        constant.gate, constant.arbiter, constant.threshold
    )
    if gain.mean() <= gain.std() / np.sqrt(len(gain)):
        return constant, f"no policy is clearly worth more than to {constant.name} retrieve"
    return best, f"{best.name} is worth the most: right answers minus the price of searches and LLM calls"


def _select_constant(questions: _Questions, always: PolicyResult, never: PolicyResult) -> PolicyResult:
    """Return the better constant policy; never retrieving must be safe."""
    return never if questions.options.accepts(never.loss) and never.value > always.value else always


def _evaluate_constants(questions: _Questions) -> tuple[PolicyResult, PolicyResult]:
    """Evaluate always and never retrieving."""
    always, never = (questions.evaluate(name, NO_ARBITER, _get_constant_threshold(name)) for name in CONSTANT_GATES)
    return always, never


def _estimate_out_of_fold(questions: _Questions, folds: NDArray[np.int64]) -> PolicyResult:
    """Choose a policy without each fold, apply it to that fold, and sum up what happens."""
    results: list[tuple[int, PolicyResult]] = []
    for fold in np.unique(folds):
        others, own = questions.select(folds != fold), questions.select(folds == fold)
        always, never = _evaluate_constants(others)
        chosen, _ = _select(others, _try_policies(others), always, never)
        results.append((int((folds == fold).sum()), own.evaluate(chosen.gate, chosen.arbiter, chosen.threshold)))
    weights = np.array([n for n, _ in results]) / len(folds)

    def average(name: str) -> float:
        return float(weights @ np.array([getattr(result, name) for _, result in results]))

    losses = [result.loss for _, result in results]
    loss = NetLoss(sum(item.lost for item in losses), sum(item.gained for item in losses), len(folds))
    return PolicyResult(
        gate=", ".join(sorted({result.gate for _, result in results})),
        arbiter=", ".join(sorted({result.arbiter for _, result in results} - {NO_ARBITER})),
        threshold=average("threshold"),
        searches=average("searches"),
        right=average("right"),
        llm_calls=average("llm_calls"),
        judge_calls=average("judge_calls"),
        loss=loss,
        value=average("value"),
    )


def _explain_constant(questions: _Questions, constant: PolicyResult, reason: str) -> tuple[str, int | None]:
    """Return why a constant policy is chosen, and how many questions would prove another one safe.

    Names the limit that the nearest setting exceeds: the one that needs the fewest questions, or else loses least.
    """
    settings = [
        (name, arbiter, threshold)
        for name, gate in questions.gates.items()
        if name not in CONSTANT_GATES
        for arbiter in (NO_ARBITER, *questions.arbiters)
        for threshold in list_rate_thresholds(gate.needs)
    ]
    results = [questions.evaluate(*setting) for setting in ((NEVER, NO_ARBITER, NEVER_RETRIEVE), *settings)]
    better = [item for item in results if item.value > constant.value and item.searches <= 1 - MIN_SAVING]
    limits = questions.options
    if constant.name != ALWAYS or not better or any(limits.accepts(item.loss) for item in better):
        return reason, None
    counts = {item: item.loss.count_required_rows(limits) for item in better}
    nearest = min(better, key=lambda item: (counts[item] is None, counts[item] or 0, item.loss.mean))
    name = f"{nearest.name} with {nearest.searches:.0%} searches"
    return f"no other policy is safe. For {name}, {limits.describe_violation(nearest.loss)}", counts[nearest]


def _get_constant_threshold(gate: str) -> float:
    """Return the threshold of a constant gate."""
    return ALWAYS_RETRIEVE if gate == ALWAYS else NEVER_RETRIEVE


def _check_lengths(
    n: int, open_right: BoolArray, gates: Sequence[GateCandidate], arbiters: Sequence[ArbiterCandidate]
) -> None:
    """Raise BadInput unless there are questions, and every candidate has one prediction per question."""
    if not n:
        raise BadInput("there are no questions to choose a policy on. Label some with `knowgate label`.")
    lengths = {"open_right": len(open_right)}
    lengths |= {f"gate '{gate.name}'": len(gate.needs) for gate in gates}
    lengths |= {f"arbiter '{arbiter.name}'": len(arbiter.takes_closed) for arbiter in arbiters}
    for name, length in lengths.items():
        if length != n:
            raise BadInput(f"{name} has {length} values for {n} questions. Pass one value per question.")
    for gate in gates:
        if not np.isfinite(gate.needs).all():
            raise BadInput(f"gate '{gate.name}' has needs that are not numbers. Score every question.")
