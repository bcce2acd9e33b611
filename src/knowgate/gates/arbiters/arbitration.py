"""Which of two answers is given: the one the arbiter believes more; where they agree, nobody is asked.

Knows arbiters by their role; not what they go by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from knowgate.data.signals.samples import canonical_answer
from knowgate.errors import ModelError
from knowgate.gates.scoring import wrap_plugin_errors
from knowgate.types import AnswerPair, Arbiter, ArbiterChoice, Belief


def answers_agree(both: AnswerPair) -> bool:
    """The same answer, as far as answers are told apart."""
    first, second = (canonical_answer(side.text, both.question) for side in (both.closed, both.open))
    return first == second


def compute_beliefs(arbiter: Arbiter, answers: Sequence[AnswerPair]) -> list[Belief | None]:
    """What the arbiter believes of each, checked; None where the answers agree and it was not asked."""
    asked = [both for both in answers if not answers_agree(both)]
    beliefs = iter(_checked(arbiter, asked) if asked else [])
    return [None if answers_agree(both) else next(beliefs) for both in answers]


def _checked(arbiter: Arbiter, answers: Sequence[AnswerPair]) -> list[Belief]:
    with wrap_plugin_errors(arbiter, "arbiter"):
        beliefs = arbiter.estimate(answers)
    if len(beliefs) != len(answers):
        raise ModelError(
            f"arbiter '{arbiter.name}' gave {len(beliefs)} beliefs for {len(answers)} pairs of answers; one each."
        )
    for both, belief in zip(answers, beliefs, strict=True):
        for value in (belief.closed, belief.open):
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise ModelError(
                    f"arbiter '{arbiter.name}' gave {value} for '{both.question.text[:60]}': not a number in [0, 1]."
                )
    return beliefs


def choose_answers(arbiter: Arbiter, answers: Sequence[AnswerPair]) -> list[ArbiterChoice]:
    """Which answer is given to each question, and why."""
    beliefs = compute_beliefs(arbiter, answers)
    return [_choice(arbiter.name, both, belief) for both, belief in zip(answers, beliefs, strict=True)]


def _choice(name: str, both: AnswerPair, belief: Belief | None) -> ArbiterChoice:
    texts = (both.closed.text, both.open.text)
    if belief is None:
        return ArbiterChoice(False, name, "the answers with and without passages agree", *texts)
    taken = belief.prefers_closed
    return ArbiterChoice(taken, name, _reason(name, belief), *texts, belief.closed, belief.open)


def _reason(name: str, belief: Belief) -> str:
    given = "from memory" if belief.prefers_closed else "with passages"
    if belief.closed == belief.open and not belief.reason:
        return f"the arbiter {name} gives the answer {given}: it believes neither more"
    return f"the arbiter {name} gives the answer {given}: {belief.reason or format_probabilities(belief.closed, belief.open)}"


def format_probabilities(closed: float, opened: float, note: str = "") -> str:
    """Both probabilities in words."""
    return f"right with probability {closed:.2f} from memory, {opened:.2f} with passages" + (
        f"; {note}" if note else ""
    )
