"""Choose gate, arbiter and threshold together, from out-of-fold predictions. Nothing is trained here.

The value of a policy is its right answers minus the cost of its searches and LLM calls. Each gate is combined with each
arbiter and with thresholds at fixed retrieval rates. Of the settings that are safe (see `SafetyLimits`), the most valuable
one is chosen. It must beat the best constant policy by more than one standard error, also in a cross-validation, in which it
is chosen on some folds of the questions and applied to the other folds. If it does not, a policy is chosen with stricter
limits. If all of these fail, the best constant policy is chosen: always or never retrieving, or always retrieving with an
arbiter.

A loss is counted against always retrieving, and against the reference: always retrieving with the arbiter that gives the most
right answers, if an arbiter is worth its cost. So a gate cannot lose what an arbiter has gained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadInput
from knowgate.gates.calibration.threshold_choice import MIN_SAVING, SafetyLimits
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.training.policy.outcomes import (
    ALWAYS,
    CONSTANT_GATES,
    NEVER,
    NO_ARBITER,
    ArbiterCandidate,
    ChoiceOptions,
    GateCandidate,
    GradedQuestions,
    PolicyResult,
    combine_results,
    format_change,
)

DEFAULT_FOLDS = 5
# The most valuable policy tends to lie at the limit of what it may lose, where it is often not safe on other questions.
# Then a policy is chosen that may lose half as much, and after that one that may lose nothing.
LOSS_SHARES = (1.0, 0.5, 0.0)
FRONTIER_RATES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
SIMPLER_MARGIN = 0.0005  # a policy with fewer models wins if it is worth at most this much less


@dataclass(frozen=True)
class RejectedPolicy:
    """A policy that looked best but failed on new questions.

    Attributes:
        name: Gate and arbiter.
        result: Accuracy and cost of the policy on the new questions.
        failure: How the policy failed, as the rest of a sentence.
    """

    name: str
    result: PolicyResult
    failure: str


@dataclass(frozen=True)
class PolicyChoice:
    """The chosen policy (gate, threshold and perhaps arbiter), and its competitors.

    Attributes:
        chosen: The chosen policy, on the questions that it was chosen on.
        always: The policy that always retrieves.
        never: The policy that never retrieves.
        constant: The best constant policy: `always`, `never`, or `always` with an arbiter.
        reference: The policy against which losses are counted. It always retrieves and may have an arbiter.
        tried: The best safe setting of each pair of gate and arbiter, most valuable first.
        estimate: Cross-validated result: a policy is chosen on all folds but one and applied to this fold. Unlike
            `chosen`, the estimate is not too optimistic.
        reason: Why this policy was chosen, in one sentence.
        required_rows: If always retrieving was chosen because no other policy could be proven safe: the number of
            questions that could suffice for the proof. Otherwise, or if no number suffices, None.
        rejected: The policy that looked best but failed on questions that it was not chosen on, so that a constant policy
            was chosen instead. None if there is no such policy.
        frontier: Results of the chosen gate and arbiter at several thresholds, with increasing shares of searches. If the
            chosen policy is constant, results of the best policy that is not constant.
    """

    chosen: PolicyResult
    always: PolicyResult
    never: PolicyResult
    constant: PolicyResult
    reference: PolicyResult
    tried: Sequence[PolicyResult]
    estimate: PolicyResult
    reason: str
    required_rows: int | None = None
    rejected: RejectedPolicy | None = None
    frontier: Sequence[PolicyResult] = ()

    def describe_losses(self, total: PolicyResult, limits: SafetyLimits) -> str:
        """Describe the loss compared with always retrieving, and with the reference policy."""
        losses = {f"{ALWAYS} retrieving": total.loss}
        if self.reference.arbiter and self.chosen.name != self.reference.name:
            losses[self.reference.name] = total.reference_loss
        sentences = []
        for name, loss in losses.items():
            worst_case = format_change(loss.upper(limits.confidence))
            sentences.append(
                f"{format_change(loss.mean)} than {name} (estimate). Worst case, with {limits.confidence:.0%} confidence: "
                f"{worst_case} (allowed: {100 * limits.loss_bound:g} points fewer)."
            )
        return " ".join(sentences)


def choose_policy(
    gates: Sequence[GateCandidate],
    closed_book_right: BoolArray,
    open_book_right: BoolArray,
    arbiters: Sequence[ArbiterCandidate] = (),
    *,
    folds: NDArray[np.int64] | None = None,
    options: ChoiceOptions | None = None,
) -> PolicyChoice:
    """Choose a gate, an arbiter and a threshold by their results on held-out questions.

    The gates 'always' and 'never' always take part.

    Args:
        gates: Gates to choose from. Each gives every question a need for retrieval (0 to 1), predicted by models that
            were not trained on the question.
        closed_book_right: Whether each answer without passages (closed-book) is right.
        open_book_right: Whether each answer with passages (open-book) is right.
        arbiters: Arbiters to choose from. After retrieval, an arbiter picks one of these two answers. Its models were not
            trained on the question either.
        folds: Fold of each question, for the estimate. Equal questions must share a fold. Default: five folds by
            position.
        options: Prices and limits.

    Returns:
        The choice; `apply_policy` applies it to other questions.

    Raises:
        BadInput: A score is not a number.

    Example:
        >>> known = np.array([True, False] * 200)
        >>> gate = GateCandidate("probe", np.where(known, 0.1, 0.9))
        >>> choice = choose_policy([gate], closed_book_right=known, open_book_right=np.ones(400, dtype=bool))
        >>> choice.chosen.gate, choice.chosen.searches, choice.chosen.right
        ('probe', 0.5, 1.0)
    """
    n = len(closed_book_right)
    for gate in gates:
        if not np.isfinite(gate.needs).all():
            raise BadInput(f"the scores of gate '{gate.name}' contain NaN or infinity. Give only finite scores.")
    constants = [GateCandidate(name, np.full(n, 0.5), reads_draft=False) for name in CONSTANT_GATES]
    gates_by_name = {gate.name: gate for gate in (*constants, *gates)}
    arbiters_by_name = {arbiter.name: arbiter for arbiter in arbiters}
    options = options or ChoiceOptions()
    questions = GradedQuestions(closed_book_right, open_book_right, gates_by_name, arbiters_by_name, options)
    questions = replace(questions, reference_arbiter=_choose_reference_arbiter(questions))
    folds = np.arange(n) % DEFAULT_FOLDS if folds is None else folds
    choice = _choose(questions, folds)
    if choice.chosen.name == ALWAYS and questions.reference_arbiter:  # `always` is worth more than the reference
        questions = replace(questions, reference_arbiter=NO_ARBITER)
        choice = _choose(questions, folds)
    return replace(choice, frontier=_trace_frontier(questions, choice))


def _choose(questions: GradedQuestions, folds: NDArray[np.int64]) -> PolicyChoice:
    """Choose the most valuable policy that passes a cross-validation.

    After each failure, a policy is chosen with stricter loss limits. If all fail, a constant policy is chosen.
    """
    limits = questions.options
    fallback = _choose_constant(questions)
    rejected = None  # the first policy that fails
    for share in LOSS_SHARES:
        stricter = replace(questions, options=limits.model_copy(update={"max_loss": share * limits.max_loss}))
        tried = _try_policies(stricter)
        candidate, reason = _select(stricter, tried)
        if candidate.is_constant:
            continue
        estimate = _estimate_out_of_fold(stricter, folds)
        failure = _describe_failure(estimate, fallback, limits)
        if not failure:
            return replace(fallback, chosen=candidate, tried=tried, estimate=estimate, reason=reason)
        rejected = rejected or RejectedPolicy(candidate.name, estimate, failure)
    if rejected is None:  # no policy with a gate was selected
        return _explain_constant(questions, fallback)
    reason = f"{rejected.name} looked best, but failed on questions that it was not chosen on: {rejected.failure}"
    required = rejected.result.reference_loss.count_required_rows(limits)
    return replace(fallback, reason=reason, required_rows=required, rejected=rejected)


def _describe_failure(estimate: PolicyResult, fallback: PolicyChoice, limits: SafetyLimits) -> str:
    """Describe why a cross-validated policy is not used: it is unsafe, or not worth more than the constant policy.

    Returns:
        The reason; '' if the policy can be used.
    """
    failure = estimate.describe_violation(limits, fallback.reference.name)
    if not failure and estimate.value <= fallback.constant.value:
        failure = f"it is not worth more than {fallback.constant.name}"
    return failure


def _choose_constant(questions: GradedQuestions) -> PolicyChoice:
    """Choose a constant policy (always or never retrieving), in case that no policy with a gate passes all checks."""
    constant = _select_constant(questions)
    return PolicyChoice(
        chosen=constant,
        always=questions.evaluate_constant(ALWAYS),
        never=questions.evaluate_constant(NEVER),
        constant=constant,
        reference=questions.evaluate_constant(ALWAYS, questions.reference_arbiter),
        tried=_try_policies(questions),
        estimate=constant,  # it has no threshold to fit, so its result needs no cross-validation
        reason="",  # added once policies with a gate have been tried
    )


def _explain_constant(questions: GradedQuestions, choice: PolicyChoice) -> PolicyChoice:
    """Add the reason why a constant policy was chosen, and how many questions could prove another policy safe."""
    nearest = _find_nearest_unproven(questions, choice.constant)
    if nearest is None:  # it is not for lack of proof that no other policy was chosen
        _, reason = _select(questions, choice.tried)
        return replace(choice, reason=reason)
    violation = nearest.describe_violation(questions.options, choice.reference.name)
    reason = f"no other policy is safe. For {nearest.name} with {nearest.searches:.0%} searches, {violation}"
    required = nearest.reference_loss.count_required_rows(questions.options)
    return replace(choice, reason=reason, required_rows=required)


def apply_policy(
    chosen: PolicyResult,
    needs: FloatArray,
    closed_book_right: BoolArray,
    open_book_right: BoolArray,
    prefers_closed_book: BoolArray | None = None,
    *,
    reads_draft: bool = True,
    reference_prefers_closed_book: BoolArray | None = None,
    options: ChoiceOptions | None = None,
) -> PolicyResult:
    """Measure accuracy and cost of a chosen policy on other questions.

    Losses are counted against the reference, a policy that always retrieves.

    Args:
        chosen: The policy, such as `PolicyChoice.chosen`.
        needs: Need for retrieval of each question, from its gate; ignored for constant gates.
        closed_book_right: Whether each closed-book answer (without passages) is right.
        open_book_right: Whether each open-book answer (with passages) is right.
        prefers_closed_book: For which questions the policy's arbiter prefers the closed-book answer; None without one.
        reads_draft: Whether the gate reads a closed-book draft; ignored for constant gates.
        reference_prefers_closed_book: The same for the arbiter of the reference; None without one.
        options: Prices.
    """
    if chosen.arbiter and prefers_closed_book is None:
        raise BadInput(
            f"the choices of the arbiter '{chosen.arbiter}' are missing. Pass them as `prefers_closed_book`."
        )
    # A constant gate decides by its threshold alone, so any need between 0 and 1 does.
    values = np.full(len(closed_book_right), 0.5) if chosen.is_constant else np.asarray(needs, dtype=float)
    gate = GateCandidate(chosen.gate, values, reads_draft and not chosen.is_constant, chosen.models)
    choices = {chosen.arbiter: prefers_closed_book, "reference": reference_prefers_closed_book}
    arbiters = {name: ArbiterCandidate(name, choice) for name, choice in choices.items() if choice is not None}
    reference_arbiter = "reference" if "reference" in arbiters else NO_ARBITER
    prices = options or ChoiceOptions()
    gates = {gate.name: gate}
    questions = GradedQuestions(closed_book_right, open_book_right, gates, arbiters, prices, reference_arbiter)
    return questions.evaluate(chosen.gate, chosen.arbiter, chosen.threshold)


def _trace_frontier(questions: GradedQuestions, choice: PolicyChoice) -> list[PolicyResult]:
    """Evaluate the chosen policy at several thresholds, to show accuracy by share of searches.

    If the chosen policy is constant, the most valuable policy with a gate is shown instead.
    """
    with_gate = [item for item in (choice.chosen, *choice.tried) if not item.is_constant]
    if not with_gate:
        return []
    policy = with_gate[0]  # `tried` is sorted by value
    needs = questions.gates[policy.gate].needs
    thresholds = [float(np.quantile(needs, 1 - rate)) for rate in FRONTIER_RATES]
    distinct = dict.fromkeys(thresholds)  # in the same order
    return [questions.evaluate(policy.gate, policy.arbiter, threshold) for threshold in distinct]


# --- selection ------------------------------------------------------------------------------------


def _try_policies(questions: GradedQuestions) -> list[PolicyResult]:
    """Evaluate each pair of gate and arbiter at its best safe threshold, most valuable first.

    Safe means: few right answers are lost compared with always retrieving.
    """
    # `never` is left out: an arbiter has nothing to choose from, and `_select_constant` considers `never` alone.
    gates = [gate for gate in questions.gates if gate != NEVER]
    pairs = product(gates, (NO_ARBITER, *questions.arbiters))
    best_settings = [_find_best_setting(questions, gate, arbiter) for gate, arbiter in pairs]
    results = [result for result in best_settings if result is not None]  # None: no threshold is safe
    return sorted(results, key=lambda result: -result.value)


def _find_best_setting(questions: GradedQuestions, gate: str, arbiter: str) -> PolicyResult | None:
    """Evaluate a gate and an arbiter at their most valuable safe threshold.

    A safe threshold loses few right answers compared with always retrieving.

    Returns:
        The result; None if no threshold is safe.
    """
    if gate in CONSTANT_GATES:
        results = [questions.evaluate_constant(gate, arbiter)]
    else:
        results = questions.evaluate_thresholds(gate, arbiter)
    is_always_safe = (gate, arbiter) == (ALWAYS, NO_ARBITER)
    safe = [result for result in results if is_always_safe or result.is_safe(questions.options)]
    return max(safe, key=lambda result: (result.value, -result.searches), default=None)


def _select(questions: GradedQuestions, tried: Sequence[PolicyResult]) -> tuple[PolicyResult, str]:
    """Select the most valuable policy, and say why.

    A gate must clearly beat the best constant policy (always or never retrieve, perhaps with an arbiter).

    Args:
        questions: The questions to compare the policies on.
        tried: The policies to select from, all of which are safe.

    Returns:
        The policy, and the reason as the rest of a sentence.
    """
    constant = _select_constant(questions)
    arbiter_note = "the arbiter is worth its LLM calls, and " if constant.arbiter else ""
    with_gate = [result for result in tried if not result.is_constant]
    if not with_gate:
        return constant, arbiter_note + "no other policy is safe and worth more"
    best = _prefer_simple(with_gate)
    gain, standard_error = questions.compare_values(best, constant)
    if gain <= standard_error:
        return constant, arbiter_note + f"no policy with a gate is clearly worth more than {constant.name}"
    return best, f"{best.name} is worth the most: right answers minus the price of searches and LLM calls"


def _prefer_simple(results: Sequence[PolicyResult]) -> PolicyResult:
    """Return the policy with the fewest models among the nearly best ones."""
    top = max(result.value for result in results)
    near = [result for result in results if result.value >= top - SIMPLER_MARGIN]
    return min(near, key=lambda result: (result.models, -result.value))


def _select_constant(questions: GradedQuestions) -> PolicyResult:
    """Return the best policy with the same decision for every question: always or never retrieving.

    An arbiter may choose between the two answers after always retrieving.
    """
    without_arbiter = questions.evaluate_constant(ALWAYS)
    never = questions.evaluate_constant(NEVER)
    if never.is_safe(questions.options) and never.value > without_arbiter.value:
        without_arbiter = never
    arbitrated = [questions.evaluate_constant(ALWAYS, arbiter) for arbiter in questions.arbiters]
    safe = [result for result in arbitrated if result.is_safe(questions.options)]
    if not safe:
        return without_arbiter
    with_arbiter = _prefer_simple(safe)
    gain, standard_error = questions.compare_values(with_arbiter, without_arbiter)
    return with_arbiter if gain > standard_error else without_arbiter  # an arbiter must bring a clear gain


def _choose_reference_arbiter(questions: GradedQuestions) -> str:
    """Choose the arbiter of the reference policy, which always retrieves. Losses are counted against this policy.

    The arbiter must give clearly more right answers, and these must not be clearly worth less than its LLM calls cost.

    Returns:
        Name of the arbiter; '' if none is worth using.
    """
    always = questions.evaluate_constant(ALWAYS)
    worth_using = [always]
    for arbiter in questions.arbiters:
        result = questions.evaluate_constant(ALWAYS, arbiter)
        gain, standard_error = questions.compare_values(result, always)
        is_clearly_right_more_often = result.right - always.right > standard_error
        is_clearly_too_expensive = gain <= -standard_error
        if is_clearly_right_more_often and not is_clearly_too_expensive:
            worth_using.append(result)
    best = max(worth_using, key=lambda result: result.right)
    return best.arbiter


def _estimate_out_of_fold(questions: GradedQuestions, folds: NDArray[np.int64]) -> PolicyResult:
    """Cross-validate the choice of a policy: each fold tests a policy that was chosen on all other folds."""
    results = []
    for fold in np.unique(folds):
        others = questions.select(folds != fold)
        chosen, _ = _select(others, _try_policies(others))
        questions_of_fold = questions.select(folds == fold)
        results.append(questions_of_fold.evaluate(chosen.gate, chosen.arbiter, chosen.threshold))
    return combine_results(results)


def _find_nearest_unproven(questions: GradedQuestions, constant: PolicyResult) -> PolicyResult | None:
    """Find the policy that comes closest to being proven safe, of those worth more than the chosen constant policy.

    Args:
        questions: The questions that the policy was chosen on.
        constant: The chosen policy, which makes the same decision for every question.

    Returns:
        The policy. None if never retrieving was chosen, if no other policy is worth more, or if such a policy is safe.
    """
    results = [questions.evaluate_constant(NEVER)]
    gates = [gate for gate in questions.gates if gate not in CONSTANT_GATES]
    for gate, arbiter in product(gates, (NO_ARBITER, *questions.arbiters)):
        results += questions.evaluate_thresholds(gate, arbiter)
    better = [item for item in results if item.value > constant.value and item.searches <= 1 - MIN_SAVING]
    limits = questions.options
    if constant.gate != ALWAYS or not better or any(item.is_safe(limits) for item in better):
        return None

    def rank(policy: PolicyResult) -> tuple[float, float]:
        """Return the number of questions needed to prove the policy safe, then its loss against the reference."""
        required = policy.reference_loss.count_required_rows(limits)
        return (required or float("inf"), policy.reference_loss.mean)

    return min(better, key=rank)
