"""The gate IK ("I know"): a judge model reads the question and the start of the LLM's own answer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from knowgate.core.schema import NumberRange, read_record
from knowgate.data.signals.vectors import draft_texts, text_features
from knowgate.gates.artifacts.networks import TensorValidator, apply_network, claim_network
from knowgate.gates.fitted_gate import EmbedderOptions, FittedGate, load_fitted_embedder
from knowgate.gates.judges import AnswerJudge, load_answer_judge, score_answers
from knowgate.gates.judges.causal_judge import JudgeOptions
from knowgate.stats.metrics import FloatArray
from knowgate.types import Embedder, Question, Reading


@dataclass(frozen=True)
class IkOptions:
    """Options that both modes of the gate share.

    Attributes:
        mode: 'lora' uses a fine-tuned judge model, 'text' a linear classifier on sentence embeddings.
        tokens: How many tokens of the LLM's draft are read.
    """

    mode: Literal["text", "lora"]
    tokens: Annotated[int, NumberRange(0, 1_000_000)]


@dataclass(frozen=True)
class IkGate(FittedGate):
    """Asks a fine-tuned judge model whether the LLM knows the answer, given the first T tokens of its draft.

    The judge answers Yes or No, and the need for retrieval is 1 - P(Yes) / (P(Yes) + P(No)). In mode `text`, a linear
    classifier on sentence embeddings of the question and of question + draft replaces the judge. That mode is for LLMs
    behind an API.

    Needs: draft (nothing with T = 0). Cost per question: one prefill of the judge (60 + T tokens), or two embeddings.
    When skipping, the draft is the start of the answer and costs nothing extra.
    Reference: the IK paper, section 3.

    Example:
        >>> gate = IkGate.load("my-ik")  # doctest: +SKIP
    """

    embedder: Embedder | None = None

    def check(self, tensors: TensorValidator) -> None:
        """Raise BadInput if the options or, in mode `text`, the tensors of the classifier are wrong."""
        options = read_record(IkOptions, self.artifact.options, "options", ignore_unknown=True)
        mode_options = EmbedderOptions if options.mode == "text" else JudgeOptions
        read_record(mode_options, self.artifact.options, "options", ignore_unknown=True)
        if options.mode == "text":
            claim_network(tensors)
        tensors.finish()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute the uncalibrated need for retrieval as 1 - P(the LLM knows)."""
        options = self.artifact.options
        texts = draft_texts(readings) if options["tokens"] else [""] * len(questions)
        if options["mode"] == "text":
            features = text_features(self.encoder, questions, texts, options["tokens"])
            return apply_network(self.artifact.tensors, features)
        return score_answers("ik", self.judge, questions, texts, options["tokens"])

    @functools.cached_property
    def judge(self) -> AnswerJudge:
        """The judge model, loaded on first use."""
        return load_answer_judge("ik", self.artifact.path, self.artifact.options, self.llm)

    @functools.cached_property
    def encoder(self) -> Embedder:
        """The embedding model that the gate was fitted with."""
        return load_fitted_embedder(self.artifact, self.embedder)
