"""Ask the LLM whether it can answer, and read the probabilities of the two label words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from knowgate.data.signals.confidence import ASSESSMENT_LABELS, SELF_ASSESSMENT, self_assessment_logit
from knowgate.errors import BadSetting
from knowgate.models.prompts.judges import build_self_assessment_prompt
from knowgate.stats.logistic import sigmoid
from knowgate.types import Gate, LabelPrompt, ModelIdentity, Question, Reading, ServedModel, Signal, TokenizingModel


def parse_label_pair(words: str, gate: str) -> tuple[str, str]:
    """(known, unknown); anything else is refused."""
    known, _, unknown = (part.strip() for part in words.partition("/"))
    if not (known and unknown):
        raise BadSetting(f"{gate}: words is '{words}'; write two labels as known/unknown.")
    return known, unknown


@dataclass(frozen=True)
class PromptGate(Gate):
    """need = P(unknown label) / (P(known label) + P(unknown label)) after the self-assessment prompt.

    Needs: labels. Cost per question: one prefill of about 120 tokens.
    Reference: Kadavath et al. 2022; wording of Lv et al. (DH-ICL), section 2.1.
    Example:
        >>> PromptGate("yes/no").labels
        ('yes', 'no')
    """

    words: str = "true/false"
    needs = frozenset({Signal.LABELS})

    def __post_init__(self) -> None:
        parse_label_pair(self.words, self.name)

    @property
    def labels(self) -> tuple[str, ...]:
        return parse_label_pair(self.words, self.name)

    @property
    def recorded_signal(self) -> str:
        """On record are the usual words only; others may be answered otherwise."""
        return SELF_ASSESSMENT if self.labels == ASSESSMENT_LABELS else ""

    def build_label_prompts(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        known, unknown = self.labels
        return [build_self_assessment_prompt(question, known, unknown) for question in questions]

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [_need(self._logit(reading)) for reading in readings]

    def _logit(self, reading: Reading) -> float:
        if self.name in reading.labels:
            return self_assessment_logit(reading.labels[self.name])
        return reading.signals[self.recorded_signal]


def _need(logit: float) -> float:
    """NaN stays NaN, which `score_questions` refuses."""
    return sigmoid(-logit)


NO_RETRIEVAL_TOKEN, RETRIEVAL_TOKEN = "[No Retrieval]", "[Retrieval]"
INSTRUCTION_TEMPLATE = "### Instruction:\n{query}\n\n### Response:\n"  # what Self-RAG's models were trained on


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
    labels = (NO_RETRIEVAL_TOKEN, RETRIEVAL_TOKEN)

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        missing = [word for word in self.labels if _count(model, word) != 1]
        if missing:
            raise BadSetting(
                f"gate 'selfrag' needs a model trained with the tokens {NO_RETRIEVAL_TOKEN} and {RETRIEVAL_TOKEN}; for {model.name} "
                f"{' and '.join(missing)} is more than one token. Use a Self-RAG model, or another gate."
            )
        return self

    def build_label_prompts(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        if self.style == "chat":
            return [LabelPrompt((question.text,), raw=False) for question in questions]
        return [LabelPrompt((INSTRUCTION_TEMPLATE.format(query=question.text),)) for question in questions]

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [_selfrag_need(*map(float, reading.labels[self.name][-1])) for reading in readings]


def _count(model: ModelIdentity, word: str) -> int:
    """Tokens of a word; 1 where nobody can tell."""
    if isinstance(model, TokenizingModel):
        return len(model.tokenize(word))
    return (model.count_tokens(word) or 1) if isinstance(model, ServedModel) else 1


def _selfrag_need(no: float, yes: float) -> float:
    """NaN stays NaN, which `score_questions` refuses."""
    return sigmoid(yes - no)
