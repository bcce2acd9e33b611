"""A judge of answers: a small fine-tuned model says whether the LLM's own answer is right. Text is all it reads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.core.schema import read_record
from knowgate.data.signals.vectors import draft_texts
from knowgate.gates.artifacts.networks import Floats, TensorValidator
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.judges import (
    AnswerJudge,
    AnswerJudgeOptions,
    compute_gain_needs,
    encode_answers,
    load_answer_judge,
    score_answers,
)
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

    def check(self, tensors: TensorValidator) -> None:
        read_record(AnswerJudgeOptions, self.artifact.options, "options", ignore_unknown=True)
        tensors.finish()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        tokens = int(self.artifact.options["tokens"])
        texts = draft_texts(readings) if tokens else [""] * len(questions)
        return score_answers("judge", self.judge, questions, texts, tokens)

    @functools.cached_property
    def judge(self) -> AnswerJudge:
        return load_answer_judge("judge", self.artifact.path, self.artifact.options, self.llm)


GAIN_PROMPTS = ("judge", "search")


@dataclass(frozen=True)
class GainGate(FittedGate):
    """need = (P(documents would be right) - P(the answer is right) + 1) / 2, both told by one judge before any search.

    Where documents fail as well, nothing is gained by looking: such questions are skipped first, which a judge of the
    answer alone would look up. Fitted like the judge, on rows with both answers; needs are then made probabilities that
    retrieval helps.

    Needs: draft. Cost per question: for each training two prefills of the judge (50 tokens and the answer); the draft
    is not wasted when skipping.
    Reference: ours.
    Example:
        >>> gate = GainGate.load("my-gain")  # doctest: +SKIP
    """

    def check(self, tensors: TensorValidator) -> None:
        read_record(AnswerJudgeOptions, self.artifact.options, "options", ignore_unknown=True)
        tensors.finish()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        tokens, texts = int(self.artifact.options["tokens"]), draft_texts(readings)
        known, found = (
            self.judge.known(encode_answers(asked, self.judge, questions, texts, tokens)) for asked in GAIN_PROMPTS
        )
        return compute_gain_needs(known, found)

    @functools.cached_property
    def judge(self) -> AnswerJudge:
        return load_answer_judge("judge", self.artifact.path, self.artifact.options, self.llm)
