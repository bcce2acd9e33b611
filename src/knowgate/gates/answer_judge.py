"""The gates `judge`, `gain` and `ik` ("I know"), in which a small fine-tuned model judges the LLM's answer.

The judge reads only text, so they work with LLMs behind an API.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from knowgate.core.schema import NumberRange, read_record
from knowgate.data.signals.vectors import draft_texts, text_features
from knowgate.gates import judges
from knowgate.gates.artifacts.networks import TensorValidator, apply_network, require_network
from knowgate.gates.fitted_gate import EmbedderOptions, FittedGate
from knowgate.stats.metrics import FloatArray
from knowgate.types import Question, Reading

GAIN_PROMPTS = ("judge", "search")  # is the LLM's answer right, and would an answer from documents be right?


@dataclass(frozen=True)
class JudgeGate(FittedGate):
    """Retrieves if a small fine-tuned judge model finds the LLM's answer wrong.

    The judge reads the question and the first T tokens of the answer; T is set when the judge is fitted. With T = 0, the
    judge reads only the question. The judge answers Yes or No, and the need for retrieval is P(No) / (P(Yes) + P(No)).

    Needs: draft; nothing with T = 0. Cost per question: the judge reads one prompt of 50 tokens plus the answer. An
    ensemble costs this for each of its models. When skipping, the draft is the start of the answer and costs nothing
    extra.
    Reference: ours.

    Example:
        >>> gate = JudgeGate.load("my-judge")  # doctest: +SKIP
    """

    prompt_name: ClassVar[str] = "judge"  # key of `judges.ANSWER_PROMPTS`

    def check(self, tensors: TensorValidator) -> None:
        """Raise BadInput if the options or tensors of the gate are wrong."""
        read_record(judges.AnswerJudgeOptions, self.artifact.options, "options", ignore_unknown=True)
        tensors.reject_unknown()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute the uncalibrated need as 1 - P(the answer is right)."""
        return 1 - self.predict_known(self.prompt_name, questions, readings)

    def predict_known(self, prompt_name: str, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Ask the judge about the draft of each question. `prompt_name` is a key of `judges.ANSWER_PROMPTS`."""
        n_draft_tokens = int(self.artifact.options["tokens"])  # 0: the judge reads only the question
        drafts = draft_texts(readings) if n_draft_tokens else [""] * len(questions)
        return self.judge.predict_known(
            judges.encode_answers(prompt_name, self.judge, questions, drafts, n_draft_tokens)
        )

    @functools.cached_property
    def judge(self) -> judges.AnswerJudge:
        """The judge model, loaded on first use."""
        return judges.load_answer_judge(self.prompt_name, self.artifact.path, self.artifact.options, self.llm)


@dataclass(frozen=True)
class GainGate(JudgeGate):
    """Retrieves if a judge model expects a better answer from documents.

    The judge predicts two probabilities: the LLM's own answer is right, and an answer from documents is right. The need
    for retrieval is their difference, mapped from [-1, 1] to [0, 1]. So the need is also low if documents cannot help.

    Needs: draft. Cost per question: the judge reads two prompts, each of 50 tokens plus the answer. An ensemble costs
    this for each of its models. When skipping, the draft is the start of the answer and costs nothing extra.
    Reference: ours.

    Example:
        >>> gate = GainGate.load("my-gain")  # doctest: +SKIP
    """

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute the uncalibrated need from the expected gain of retrieval.

        Gain: P(document answer right) - P(LLM answer right).
        """
        llm_right, document_right = (self.predict_known(name, questions, readings) for name in GAIN_PROMPTS)
        return judges.compute_gain_needs(known=llm_right, document_right=document_right)


@dataclass(frozen=True)
class IkOptions:
    """Options of an `ik` ("I know") gate, which predicts whether the LLM knows the answer.

    Attributes:
        mode: What predicts this: 'lora' is a fine-tuned judge model, 'text' a linear classifier on sentence embeddings.
        tokens: How many tokens of the LLM's draft answer are read; 0 to read the question only.
    """

    mode: Literal["text", "lora"]
    tokens: Annotated[int, NumberRange(0, 1_000_000)]


@dataclass(frozen=True)
class IkGate(JudgeGate):
    """Asks a fine-tuned judge model whether the LLM knows the answer.

    The judge reads the question and the first T tokens of the draft. The judge answers Yes or No, and the need for
    retrieval is P(No) / (P(Yes) + P(No)). In mode `text`, a linear classifier on sentence embeddings replaces the judge.

    Needs: draft; nothing with T = 0. Cost per question: the judge reads 60 + T tokens. In mode `text`, two texts are
    embedded instead. When skipping, the draft is the start of the answer and costs nothing extra.
    Reference: the IK paper, section 3.

    Example:
        >>> gate = IkGate.load("my-ik")  # doctest: +SKIP
    """

    prompt_name = "ik"

    def check(self, tensors: TensorValidator) -> None:
        """Raise BadInput if the options or tensors of the gate are wrong. Only mode `text` has tensors."""
        options = read_record(IkOptions, self.artifact.options, "options", ignore_unknown=True)
        mode_options = EmbedderOptions if options.mode == "text" else judges.causal_judge.JudgeOptions
        read_record(mode_options, self.artifact.options, "options", ignore_unknown=True)
        if options.mode == "text":
            require_network(tensors)
        tensors.reject_unknown()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute the uncalibrated need as 1 - P(the LLM knows the answer)."""
        if self.artifact.options["mode"] == "lora":
            return super().raw(questions, readings)
        n_draft_tokens = self.artifact.options["tokens"]  # 0: only the question is embedded
        drafts = draft_texts(readings) if n_draft_tokens else [""] * len(questions)
        return apply_network(self.artifact.tensors, text_features(self.encoder, questions, drafts, n_draft_tokens))
