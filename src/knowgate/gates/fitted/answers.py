"""What gates with a judge of answers share: the question it is asked, and what it reads of the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from knowgate.gates.fitted.judge import Judge
from knowgate.gates.fitted.probability import Floats
from knowgate.prompts import ik_text, right_text
from knowgate.types import Question

if TYPE_CHECKING:
    from knowgate.models import MarkedTokens

ANSWER_LABELS = ("Yes", "No")


class AnswerPrompt(NamedTuple):
    """The set of templates a judge of answers is asked with, and the text; no answer: the question alone."""

    templates: str
    text: Callable[[Question, str | None], str]


# IK is asked whether the LLM can answer, given how its answer begins; the judge whether the answer is right
ANSWER_PROMPTS: Mapping[str, AnswerPrompt] = {
    "ik": AnswerPrompt("ik", lambda question, answer: ik_text(question, answer or "")),
    "judge": AnswerPrompt("right", right_text),
}


def answer_needs(gate: str, judge: Judge, questions: Sequence[Question], texts: Sequence[str], tokens: int) -> Floats:
    """Uncalibrated needs of questions and answers."""
    return 1 - judge.known(answer_cuts(gate, judge, questions, texts, tokens))


def answer_cuts(
    gate: str, judge: Judge, questions: Sequence[Question], texts: Sequence[str], tokens: int
) -> list[MarkedTokens]:
    """What the judge of this gate reads: the question, and so many tokens of the answer (0: no answer)."""
    ask = ANSWER_PROMPTS[gate].text
    pairs = zip(questions, texts, strict=True)
    return [judge.encode(ask(question, judge.beginning(text, tokens) if tokens else None)) for question, text in pairs]
