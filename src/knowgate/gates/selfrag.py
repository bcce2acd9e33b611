"""Self-RAG: a model trained to say, before it answers, whether it wants to retrieve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from knowgate.errors import BadSetting
from knowgate.statistics import sigmoid
from knowgate.types import Gate, LabelPrompt, ListingModel, ModelIdentity, Question, Reading, Signal, TokenisingModel

NO, YES = "[No Retrieval]", "[Retrieval]"
TURN = "### Instruction:\n{query}\n\n### Response:\n"  # what Self-RAG's models were trained on


@dataclass(frozen=True)
class SelfragGate(Gate):
    """need = P([Retrieval]) / (P([Retrieval]) + P([No Retrieval])) where the answer begins.

    Only for models whose tokenizer has the two tokens; others are refused. style: `selfrag` asks in the form Self-RAG's
    own models were trained on, `chat` as a user turn. The formula is tested on a tiny untrained model that was given
    the two tokens; what it is worth was not measured, for want of a model trained with them.

    Needs: labels. Cost per question: one prefill of the bare question.
    Reference: Asai et al. 2024 (Self-RAG), section 3.3; threshold 0.2 of its section 4.3.
    Example:
        >>> SelfragGate().labels
        ('[No Retrieval]', '[Retrieval]')
    """

    style: Literal["selfrag", "chat"] = "selfrag"
    needs = frozenset({Signal.LABELS})
    threshold = 0.2
    labels = (NO, YES)

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        missing = [word for word in self.labels if _count(model, word) != 1]
        if missing:
            raise BadSetting(
                f"gate 'selfrag' needs a model trained with the tokens {NO} and {YES}; for {model.name} "
                f"{' and '.join(missing)} is more than one token. Use a Self-RAG model, or another gate."
            )
        return self

    def ask(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        if self.style == "chat":
            return [LabelPrompt((question.text,), raw=False) for question in questions]
        return [LabelPrompt((TURN.format(query=question.text),)) for question in questions]

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [_need(*map(float, reading.labels[self.name][-1])) for reading in readings]


def _count(model: ModelIdentity, word: str) -> int:
    """Tokens of a word; 1 where nobody can tell."""
    if isinstance(model, TokenisingModel):
        return len(model.tokenise(word))
    return (model.n_tokens(word) or 1) if isinstance(model, ListingModel) else 1


def _need(no: float, yes: float) -> float:
    """NaN stays NaN, which `score_questions` refuses."""
    return sigmoid(yes - no)
