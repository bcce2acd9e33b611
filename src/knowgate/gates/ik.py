"""IK, "I know": a judge reads the question and the beginning of the LLM's own answer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from knowgate.gates.fitted.answers import AnswerJudge, answer_needs, open_answer_judge
from knowgate.gates.fitted.base import FittedGate
from knowgate.gates.fitted.encoder import EncoderOptions, fitted_encoder
from knowgate.gates.fitted.judge import JudgeOptions
from knowgate.gates.fitted.network import apply_network, expect_network
from knowgate.gates.fitted.probability import Floats
from knowgate.gates.fitted.tensors import ExpectedTensors
from knowgate.signals import draft_texts, text_features
from knowgate.typed import Between, read_record
from knowgate.types import Embedder, Question, Reading


@dataclass(frozen=True)
class IkOptions:
    """What both modes have; each has more of its own."""

    mode: Literal["text", "lora"]
    tokens: Annotated[int, Between(0, 1_000_000)]


@dataclass(frozen=True)
class IkGate(FittedGate):
    """need = 1 - P(Yes) / (P(Yes) + P(No)) of a fine-tuned judge, given the question and the first T draft tokens.

    Mode `text`: a linear head over sentence embeddings of the question and of question + draft; for LLMs behind an API.

    Needs: draft (nothing with T = 0). Cost per question: one prefill of the judge (60 + T tokens), or two embeddings;
    the draft is not wasted when skipping.
    Reference: the IK paper, section 3.
    Example:
        >>> gate = IkGate.load("my-ik")  # doctest: +SKIP
    """

    embedder: Embedder | None = None

    def check(self, tensors: ExpectedTensors) -> None:
        options = read_record(IkOptions, self.artefact.options, "options", others=True)
        own = EncoderOptions if options.mode == "text" else JudgeOptions
        read_record(own, self.artefact.options, "options", others=True)
        if options.mode == "text":
            expect_network(tensors)
        tensors.finish()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        options = self.artefact.options
        texts = draft_texts(readings) if options["tokens"] else [""] * len(questions)
        if options["mode"] == "text":
            return apply_network(
                self.artefact.tensors, text_features(self.encoder, questions, texts, options["tokens"])
            )
        return answer_needs("ik", self.judge, questions, texts, options["tokens"])

    @functools.cached_property
    def judge(self) -> AnswerJudge:
        return open_answer_judge("ik", self.artefact.path, self.artefact.options, self.llm)

    @functools.cached_property
    def encoder(self) -> Embedder:
        return fitted_encoder(self.artefact, self.embedder)
