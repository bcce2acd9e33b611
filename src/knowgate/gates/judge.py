"""A judge of answers: a small fine-tuned model says whether the LLM's own answer is right. Text is all it reads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.gates.fitted.answers import AnswerJudge, AnswerOptions, answer_needs, open_answer_judge
from knowgate.gates.fitted.base import FittedGate
from knowgate.gates.fitted.probability import Floats
from knowgate.gates.fitted.tensors import ExpectedTensors
from knowgate.signals import draft_texts
from knowgate.typed import read_record
from knowgate.types import Question, Reading


@dataclass(frozen=True)
class JudgeGate(FittedGate):
    """need = 1 - P(Yes) / (P(Yes) + P(No)) of a judge asked whether the LLM's answer is right.

    The judge is any causal model, far smaller than the LLM, fine-tuned on graded answers, or a small encoder that reads
    question and answer as a pair; several trainings of it are averaged. With 0 tokens it sees the question alone, and
    no draft is needed.

    Needs: draft (nothing with 0 tokens). Cost per question: for each training one prefill of the judge (50 tokens and
    the answer); the draft is not wasted when skipping.
    Reference: ours.
    Example:
        >>> gate = JudgeGate.load("my-judge")  # doctest: +SKIP
    """

    def check(self, tensors: ExpectedTensors) -> None:
        read_record(AnswerOptions, self.artefact.options, "options", others=True)
        tensors.finish()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        tokens = int(self.artefact.options["tokens"])
        texts = draft_texts(readings) if tokens else [""] * len(questions)
        return answer_needs("judge", self.judge, questions, texts, tokens)

    @functools.cached_property
    def judge(self) -> AnswerJudge:
        return open_answer_judge("judge", self.artefact.path, self.artefact.options, self.llm)
