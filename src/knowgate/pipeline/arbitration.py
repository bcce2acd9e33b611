"""After retrieval: the arbiter weighs the answer with passages against the draft, and the likelier one is given.

Knows cases and arbiters by their role. An answer that may yet be replaced is held back, so that nobody hears it first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from knowgate.arbiters import RULES, choose
from knowgate.errors import NotOffered
from knowgate.pipeline.case import Case, is_whole, timed
from knowgate.prompts import AnswerPrompts
from knowgate.thresholds import is_proven_alone
from knowgate.types import Arbiter, BothAnswers, Gate, Model, Note, TextEvent


def bind_arbiter(arbiter: Arbiter | None, gate: Gate, model: Model, prompts: AnswerPrompts) -> Arbiter | None:
    """The arbiter, found to work with this model.

    The rules that are on by default stay out where something is proven about the gate without them.
    """
    if arbiter is None or (arbiter is RULES and is_proven_alone(gate)):
        return None
    missing = arbiter.needs - model.offers
    if missing:
        raise NotOffered(
            f"the arbiter '{arbiter.name}' needs {', '.join(sorted(missing))}, which {model.name} does not give. Fit "
            "one on label runs of this LLM, or use --arbiter rules."
        )
    return arbiter.bind(model, prompts.fingerprint)


def hold_back(arbiter: Arbiter | None, cases: Sequence[Case], max_tokens: int) -> None:
    """Mark the cases whose answer with passages may be replaced by their draft."""
    if arbiter is None:
        return
    for case in cases:
        if case.reading.draft is not None and is_whole(case.reading.draft, max_tokens):
            case.lets_out = arbiter.lets_out


def arbitrate(arbiter: Arbiter | None, cases: Sequence[Case]) -> Iterator[TextEvent]:
    """Give each held case its answer, and say what was held back."""
    held = [case for case in cases if case.lets_out is not None]
    if arbiter is None or not held:
        return
    with timed(held, "arbiter"):
        choices = choose(arbiter, [_both(case) for case in held])
    for case, choice in zip(held, choices, strict=True):
        case.choice = choice
        if choice.from_memory:
            case.text = choice.closed
            case.notes.append(Note.DRAFT_GIVEN)
        if case.text and not case.was_let_out:
            yield TextEvent(case.text)


def _both(case: Case) -> BothAnswers:
    draft, opened = case.reading.draft, case.done
    if draft is None or opened is None:
        raise RuntimeError("a case is weighed before it has two answers")
    return BothAnswers(case.question, draft, opened, case.passages)
