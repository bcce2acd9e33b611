"""A fine-tuned judge as arbiter: one judge, shown both answers, is asked of each whether it is right."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np

from knowgate.core.schema import NumberRange, read_record
from knowgate.gates.arbiters.fitted_arbiter import FittedArbiter
from knowgate.gates.artifacts.networks import TensorValidator
from knowgate.gates.judges.causal_judge import ADAPTER_FOLDER, CausalJudge, JudgeOptions, load_judge
from knowgate.models.prompts.judges import ARBITER_SIDES, build_arbiter_prompt
from knowgate.stats.metrics import FloatArray
from knowgate.types import AnswerPair

if TYPE_CHECKING:
    from knowgate.models.tokenization import LabelPromptTokens

ARBITER_TEMPLATES, ARBITER_LABELS = "right", ("Yes", "No")


@dataclass(frozen=True, kw_only=True)
class LoraArbiterOptions(JudgeOptions):
    """tokens: of each answer. passages: how many of the passages are shown to the judge."""

    tokens: Annotated[int, NumberRange(1, 1_000_000)]
    passages: Annotated[int, NumberRange(0, 1_000)]


@dataclass(frozen=True, repr=False)
class LoraArbiter(FittedArbiter):
    """P(right) of each answer = P(Yes) / (P(Yes) + P(No)) of a judge that sees both and is asked about one.

    Needs: two texts; passages if it was fitted with them. Cost per question: two prefills of the judge (70 tokens and
    both answers) for each training; none where the answers agree.
    """

    def check(self, tensors: TensorValidator) -> None:
        read_record(LoraArbiterOptions, self.artifact.options, "options", ignore_unknown=True)

    @functools.cached_property
    def judge(self) -> CausalJudge:
        return load_judge(self.artifact.path / ADAPTER_FOLDER, self.artifact.options, ARBITER_TEMPLATES, self.llm)

    def raw(self, answers: Sequence[AnswerPair]) -> FloatArray:
        options = self.artifact.options
        known = [
            self.judge.predict_known(
                encode_answer_pairs(self.judge, answers, side, options["tokens"], options["passages"])
            )
            for side in ARBITER_SIDES
        ]
        found: FloatArray = np.stack(known, axis=1)
        return found


def encode_answer_pairs(
    judge: CausalJudge, answers: Sequence[AnswerPair], side: str, tokens: int, passages: int
) -> list[LabelPromptTokens]:
    """What the judge reads when it is asked about one side."""
    return [
        judge.encode(
            build_arbiter_prompt(
                both.question,
                judge.truncate(both.closed.text, tokens),
                judge.truncate(both.open.text, tokens),
                side,
                both.passages[:passages],
            )
        )
        for both in answers
    ]
