"""Gates with a small judge of answers, which reads only text: `judge` and `gain`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.core.schema import read_record
from knowgate.data.signals.vectors import draft_texts
from knowgate.gates import judges
from knowgate.gates.artifacts.networks import TensorValidator
from knowgate.gates.fitted_gate import FittedGate
from knowgate.stats.metrics import FloatArray
from knowgate.types import Question, Reading

GAIN_PROMPTS = ("judge", "search")


@dataclass(frozen=True)
class JudgeGate(FittedGate):
    """Asks a fine-tuned judge whether the LLM's answer is right.

    need = 1 - P(Yes) / (P(Yes) + P(No)). The judge is a causal model, much smaller than the LLM, that was fine-tuned
    on graded answers, or a small encoder of question-answer pairs. Several trainings are averaged. With 0 tokens the
    judge sees only the question, and no draft is needed.

    Needs: draft (nothing with 0 tokens). Cost per question: for each training one prefill of the judge (50 tokens and
    the answer); the draft is not wasted when skipping.
    Reference: ours.

    Example:
        >>> gate = JudgeGate.load("my-judge")  # doctest: +SKIP
    """

    def check(self, tensors: TensorValidator) -> None:
        """Check the options of the judge."""
        read_record(judges.AnswerJudgeOptions, self.artifact.options, "options", ignore_unknown=True)
        tensors.finish()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute 1 - P(the answer is right)."""
        tokens = int(self.artifact.options["tokens"])
        texts = draft_texts(readings) if tokens else [""] * len(questions)
        return judges.score_answers("judge", self.judge, questions, texts, tokens)

    @functools.cached_property
    def judge(self) -> judges.AnswerJudge:
        """The judge, loaded on first use."""
        return judges.load_answer_judge("judge", self.artifact.path, self.artifact.options, self.llm)


@dataclass(frozen=True)
class GainGate(JudgeGate):
    """Asks a judge whether the LLM's answer is right and whether one from documents would be.

    need = (P(documents would be right) - P(the answer is right) + 1) / 2. Both are predicted before any search. Where
    documents would fail too, retrieval gains nothing, so such questions are skipped first. The judge is fitted on rows
    with both answers, and the need is calibrated to the probability that retrieval helps.

    Needs: draft. Cost per question: for each training two prefills of the judge (50 tokens and the answer); the draft
    is not wasted when skipping.
    Reference: ours.

    Example:
        >>> gate = GainGate.load("my-gain")  # doctest: +SKIP
    """

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute the expected gain of retrieval, mapped to [0, 1]."""
        tokens, texts = int(self.artifact.options["tokens"]), draft_texts(readings)
        known, document_right = (
            self.judge.predict_known(judges.encode_answers(name, self.judge, questions, texts, tokens))
            for name in GAIN_PROMPTS
        )
        return judges.compute_gain_needs(known, document_right)
