"""Gates that ask the LLM itself: in words, by the tokens of Self-RAG, or by offering it a search tool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from knowgate.data.signals.confidence import ASSESSMENT_LABELS, SELF_ASSESSMENT, self_assessment_logit
from knowgate.errors import BadSetting
from knowgate.gates.scoring import parse_label_pair
from knowgate.models.prompts.questions import build_self_assessment_prompt
from knowgate.models.tools import TOOL_CALL
from knowgate.stats.metrics import sigmoid
from knowgate.types import Gate, LabelPrompt, ModelIdentity, Question, Reading, ServedModel, Signal, TokenizingModel


@dataclass(frozen=True)
class ToolGate(Gate):
    """Offers the LLM a search tool, and retrieves if the LLM calls the tool.

    For local models, the need is the probability of a tool call. For servers, the need is 1 after a tool call,
    otherwise 0. LLMs without tools are rejected.

    Needs: tools. Cost per question: one prefill of about 200 tokens. On a server, one LLM call.
    Reference: Schick et al. 2023 (Toolformer). This is the default of agent frameworks.

    Example:
        >>> ToolGate().score([Question("?")], [Reading(signals={"tool_call": 0.8})])
        [0.8]
    """

    needs = frozenset({Signal.TOOLS})
    is_pure = True  # `score` is a short computation that uses no model, file or network

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Return the probability of a tool call as the need for retrieval."""
        return [reading.signals[TOOL_CALL] for reading in readings]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Say how probably the LLM calls the search tool."""
        return [f"the LLM calls the search tool with probability {item.signals[TOOL_CALL]:.2f}" for item in readings]


NO_RETRIEVAL_TOKEN, RETRIEVAL_TOKEN = "[No Retrieval]", "[Retrieval]"
INSTRUCTION_TEMPLATE = "### Instruction:\n{query}\n\n### Response:\n"  # the training format of Self-RAG's models


@dataclass(frozen=True)
class PromptGate(Gate):
    """Asks the LLM whether it can answer the question, and retrieves after a no.

    The LLM answers with one of two labels. The need for retrieval is P(unknown label) / (P(known label) + P(unknown
    label)). `words` sets the labels, known first: 'true/false'.

    Needs: labels. Cost per question: one prefill of about 120 tokens.
    Reference: Kadavath et al. 2022. The prompt is from Lv et al. (DH-ICL), section 2.1.

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
        """The two answer labels: known, unknown."""
        return parse_label_pair(self.words, self.name)

    @property
    def recorded_signal(self) -> str:
        """Name of the signal under which label runs record the LLM's answer to this prompt.

        Label runs ask with the default labels only. For other labels, the result is ''.
        """
        return SELF_ASSESSMENT if self.labels == ASSESSMENT_LABELS else ""

    def build_label_prompts(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        """Build the prompt that asks the LLM whether it can answer each question."""
        known, unknown = self.labels
        return [build_self_assessment_prompt(question, known, unknown) for question in questions]

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Compute the need for retrieval as the probability of the unknown label."""
        return [sigmoid(-self._get_known_logit(reading)) for reading in readings]  # the caller rejects NaN

    def _get_known_logit(self, reading: Reading) -> float:
        """Return the log-odds of the label for 'known'. In label runs, these are a recorded signal."""
        if self.name in reading.labels:
            return self_assessment_logit(reading.labels[self.name])
        return reading.signals[self.recorded_signal]


@dataclass(frozen=True)
class SelfragGate(Gate):
    """Retrieves if a Self-RAG model prefers its [Retrieval] token.

    The need for retrieval is P([Retrieval]) / (P([Retrieval]) + P([No Retrieval])) at the start of the answer. LLMs
    without these tokens are rejected. The quality of this gate was not measured, for lack of a trained model.

    Needs: labels. Cost per question: one prefill of the bare question.
    Reference: Asai et al. 2024 (Self-RAG), section 3.3. The threshold 0.2 is from its section 4.3.

    Example:
        >>> SelfragGate().labels
        ('[No Retrieval]', '[Retrieval]')
    """

    needs = frozenset({Signal.LABELS})
    threshold = 0.2
    labels = (NO_RETRIEVAL_TOKEN, RETRIEVAL_TOKEN)

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """Return the gate itself, after checking that the model has both retrieval tokens.

        Raises:
            BadSetting: The model's tokenizer splits one of these tokens into several.
        """
        missing = [label for label in self.labels if _count_tokens(model, label) != 1]
        if missing:
            raise BadSetting(
                f"gate 'selfrag' needs an LLM with the tokens {NO_RETRIEVAL_TOKEN} and {RETRIEVAL_TOKEN}. In {model.name}, "
                f"{' and '.join(missing)} is not a single token. Use a Self-RAG model, or another gate."
            )
        return self

    def build_label_prompts(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        """Build one prompt per question in Self-RAG's training format."""
        return [LabelPrompt((INSTRUCTION_TEMPLATE.format(query=question.text),)) for question in questions]

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Compute the need for retrieval as the probability of the [Retrieval] token."""
        logits = [reading.labels[self.name][-1] for reading in readings]  # of both tokens, at the end of the prompt
        return [sigmoid(float(retrieval) - float(no_retrieval)) for no_retrieval, retrieval in logits]


def _count_tokens(model: ModelIdentity, text: str) -> int:
    """Count the tokens of a text. If the model cannot count them, assume that the text is one token."""
    if isinstance(model, TokenizingModel):
        return len(model.tokenize(text))
    if isinstance(model, ServedModel):
        return model.count_tokens(text) or 1
    return 1
