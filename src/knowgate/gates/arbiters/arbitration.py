"""Choice between the closed-book and the open-book answer: the one that the arbiter finds more likely to be right.

If the two answers agree, the arbiter is not called and the open-book answer is given. If one of them is empty, the
other one is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from knowgate.core.text import cut_answer
from knowgate.data.signals.samples import canonical_answer
from knowgate.errors import ModelError
from knowgate.gates.arbiters.abstention import NEUTRAL_BELIEF
from knowgate.gates.scoring import wrap_plugin_errors
from knowgate.types import AnswerPair, Arbiter, ArbiterChoice, Belief, Completion


def answers_agree(pair: AnswerPair) -> bool:
    """Return whether the two answers are the same after normalization."""
    closed, open = (canonical_answer(cut_answer(answer.text), pair.question) for answer in (pair.closed, pair.open))
    return closed == open


def compute_beliefs(arbiter: Arbiter, answers: Sequence[AnswerPair]) -> list[Belief | None]:
    """Ask an arbiter how probably each of two answers is right.

    Returns:
        One belief per pair of answers; None for pairs that agree. The arbiter is asked neither about these nor about
        pairs with an empty answer.

    Raises:
        ModelError: The arbiter did not return one belief per pair, or returned numbers outside [0, 1].
    """
    beliefs = [_prefer_non_empty(pair) for pair in answers]  # None: both answers have text, or none
    undecided = [index for index, pair in enumerate(answers) if beliefs[index] is None and not answers_agree(pair)]
    if undecided:
        estimated = _estimate(arbiter, [answers[index] for index in undecided])
        for index, belief in zip(undecided, estimated, strict=True):
            beliefs[index] = belief
    return beliefs


def _prefer_non_empty(pair: AnswerPair) -> Belief | None:
    """Return the belief that the non-empty answer is better; None unless exactly one of the two answers is empty."""
    if pair.closed.is_empty == pair.open.is_empty:
        return None
    if pair.open.is_empty:
        return Belief(closed=NEUTRAL_BELIEF, open=0.0, reason="the answer with passages is empty")
    return Belief(closed=0.0, open=NEUTRAL_BELIEF, reason="the answer from memory is empty")


def accepts_beginning(arbiter: Arbiter, beginning: str) -> bool:
    """Return whether an answer with this beginning can be streamed, because the arbiter will choose it."""
    return not Completion(beginning).is_empty and arbiter.accepts_beginning(beginning)


def _estimate(arbiter: Arbiter, answers: Sequence[AnswerPair]) -> list[Belief]:
    """Ask an arbiter how probably each answer is right, and check its results.

    Raises:
        ModelError: The arbiter did not return one belief per pair of answers, or a probability is not from 0 to 1.
    """
    with wrap_plugin_errors(arbiter, "arbiter"):
        beliefs = arbiter.estimate(answers)
    if len(beliefs) != len(answers):
        raise ModelError(
            f"arbiter '{arbiter.name}' returned {len(beliefs)} results for {len(answers)} pairs of answers. It must "
            "return one result per pair."
        )
    for pair, belief in zip(answers, beliefs, strict=True):
        _check_belief(arbiter, pair, belief)
    return beliefs


def _check_belief(arbiter: Arbiter, pair: AnswerPair, belief: Belief) -> None:
    """Raise ModelError if a probability is not from 0 to 1."""
    for probability in (belief.closed, belief.open):
        if not (math.isfinite(probability) and 0 <= probability <= 1):
            raise ModelError(
                f"arbiter '{arbiter.name}' returned the probability {probability} for '{pair.question.text[:60]}'. A "
                "probability must be a number from 0 to 1.",
                brief=f"arbiter '{arbiter.name}' returned the probability {probability}, which is not from 0 to 1",
            )


def choose_answers(arbiter: Arbiter, answers: Sequence[AnswerPair]) -> list[ArbiterChoice]:
    """Choose the answer without or with passages for each question, with a reason."""
    beliefs = compute_beliefs(arbiter, answers)
    return [_choose(arbiter.name, pair, belief) for pair, belief in zip(answers, beliefs, strict=True)]


def _choose(arbiter: str, pair: AnswerPair, belief: Belief | None) -> ArbiterChoice:
    """Choose the answer with the higher probability of being right.

    Args:
        arbiter: Name of the arbiter.
        pair: The closed-book answer (without passages) and the open-book answer (with passages).
        belief: How probably each answer is right. None if both answers agree; then the open-book answer is chosen.
    """
    closed_book, open_book = pair.closed.text, pair.open.text
    if belief is None:
        reason = "the answers with and without passages agree"
        return ArbiterChoice(is_closed_book=False, arbiter=arbiter, reason=reason, closed=closed_book, open=open_book)
    side = "from memory" if belief.prefers_closed else "with passages"
    cause = belief.reason or format_probabilities(belief.closed, belief.open)
    reason = f"the arbiter {arbiter} gives the answer {side}: {cause}"
    return ArbiterChoice(belief.prefers_closed, arbiter, reason, closed_book, open_book, belief.closed, belief.open)


def format_probabilities(closed_book: float, open_book: float, note: str = "") -> str:
    """Say how probably the answers from memory and with passages are right."""
    text = f"right with probability {closed_book:.2f} from memory, {open_book:.2f} with passages"
    return f"{text}; {note}" if note else text
