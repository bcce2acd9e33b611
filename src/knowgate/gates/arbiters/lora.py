"""The `lora` arbiter: a fine-tuned judge sees both answers and says for each whether it is right."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from knowgate.core.schema import NumberRange, read_record
from knowgate.gates.arbiters.fitted_arbiter import FittedArbiter
from knowgate.gates.artifacts.networks import TensorValidator
from knowgate.gates.judges.causal_judge import ADAPTER_FOLDER, CausalJudge, JudgeOptions, load_judge
from knowgate.models.prompts.judges import ARBITER_SIDES, build_arbiter_prompt
from knowgate.models.tokenization import LabelPromptTokens
from knowgate.stats.metrics import FloatArray
from knowgate.types import AnswerPair

ARBITER_TEMPLATES, ARBITER_LABELS = "right", ("Yes", "No")


@dataclass(frozen=True, kw_only=True)
class LoraArbiterOptions(JudgeOptions):
    """Options in the manifest of a lora arbiter.

    Attributes:
        tokens: How many tokens of each answer the judge reads.
        passages: How many passages the judge reads.
    """

    tokens: Annotated[int, NumberRange(1, 1_000_000)]
    passages: Annotated[int, NumberRange(0, 1_000)]


@dataclass(frozen=True, repr=False)
class LoraArbiter(FittedArbiter):
    """Asks a fine-tuned judge, which sees both answers, whether each of them is right.

    P(right) = P(Yes) / (P(Yes) + P(No)).

    Needs: two texts; passages if it was fitted with them. Cost per question: two prefills of the judge (70 tokens and
    both answers) for each training; none if the answers agree.
    """

    def check(self, tensors: TensorValidator) -> None:
        """Check the options of the judge."""
        read_record(LoraArbiterOptions, self.artifact.options, "options", ignore_unknown=True)

    @functools.cached_property
    def judge(self) -> CausalJudge:
        """The judge, loaded on first use."""
        return load_judge(self.artifact.path / ADAPTER_FOLDER, self.artifact.options, ARBITER_TEMPLATES, self.llm)

    def raw(self, answers: Sequence[AnswerPair]) -> FloatArray:
        """Ask the judge about each side."""
        tokens, passages = self.artifact.options["tokens"], self.artifact.options["passages"]
        columns = [
            self.judge.predict_known(encode_answer_pairs(self.judge, answers, side, tokens, passages))
            for side in ARBITER_SIDES
        ]
        return np.stack(columns, axis=1)


def encode_answer_pairs(
    judge: CausalJudge, answers: Sequence[AnswerPair], side: str, tokens: int, passages: int
) -> list[LabelPromptTokens]:
    """Tokenize the prompts that ask whether the answer of one side is right.

    Args:
        judge: The judge.
        answers: Pairs of answers.
        side: One of `ARBITER_SIDES`.
        tokens: How many tokens of each answer to show.
        passages: How many passages to show.
    """
    return [
        judge.encode(
            build_arbiter_prompt(
                pair.question,
                judge.truncate(pair.closed.text, tokens),
                judge.truncate(pair.open.text, tokens),
                side,
                pair.passages[:passages],
            )
        )
        for pair in answers
    ]
