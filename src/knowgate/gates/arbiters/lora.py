"""The `lora` arbiter: a fine-tuned judge model reads both answers and says for each whether it is right."""

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
from knowgate.models.prompts.questions import ARBITER_SIDES, build_arbiter_prompt
from knowgate.models.tokenization import LabelPromptTokens
from knowgate.stats.metrics import FloatArray
from knowgate.types import AnswerPair

ARBITER_TEMPLATES, ARBITER_LABELS = "right", ("Yes", "No")


@dataclass(frozen=True, kw_only=True)
class LoraArbiterOptions(JudgeOptions):
    """Options of a lora arbiter in `arbiter.json`.

    Attributes:
        tokens: How many tokens of each answer the judge reads.
        passages: How many passages the judge reads.
    """

    tokens: Annotated[int, NumberRange(1, 1_000_000)]
    passages: Annotated[int, NumberRange(0, 1_000)]


@dataclass(frozen=True, repr=False)
class LoraArbiter(FittedArbiter):
    """Asks a fine-tuned judge model whether each of two answers is right.

    The judge answers Yes or No, and P(right) = P(Yes) / (P(Yes) + P(No)).

    Needs: the texts of both answers; also the passages if the judge was fitted with them. Cost per question: two
    prompts for each judge model, each of 70 tokens plus both answers. Answers that agree cost nothing.
    """

    def check(self, tensors: TensorValidator) -> None:
        """Raise BadInput if the options of the judge are wrong."""
        read_record(LoraArbiterOptions, self.artifact.options, "options", ignore_unknown=True)

    @functools.cached_property
    def judge(self) -> CausalJudge:
        """The judge model, loaded on first use."""
        return load_judge(self.artifact.path / ADAPTER_FOLDER, self.artifact.options, ARBITER_TEMPLATES, self.llm)

    def raw(self, answers: Sequence[AnswerPair]) -> FloatArray:
        """Ask the judge how probably each answer is right.

        Returns:
            One row per pair of answers with two columns: closed-book (without passages), open-book (with passages).
        """
        options = self.artifact.options
        columns = []
        for side in ARBITER_SIDES:
            prompts = encode_answer_pairs(self.judge, answers, side, options["tokens"], options["passages"])
            columns.append(self.judge.predict_known(prompts))
        return np.stack(columns, axis=1)


def encode_answer_pairs(
    judge: CausalJudge, answers: Sequence[AnswerPair], side: str, tokens: int, passages: int
) -> list[LabelPromptTokens]:
    """Tokenize a prompt for each pair of answers. The prompt asks the judge whether one of the two answers is right.

    Args:
        judge: The judge.
        answers: Pairs of answers. Long questions are cut.
        side: Which answer to ask about: one of `ARBITER_SIDES`.
        tokens: Maximum number of tokens of each answer to show.
        passages: Maximum number of passages to show.
    """
    encoded = []
    for pair in answers:
        closed_book, open_book = judge.truncate(pair.closed.text, tokens), judge.truncate(pair.open.text, tokens)
        question = judge.shorten(pair.question)
        prompt = build_arbiter_prompt(question, closed_book, open_book, side, pair.passages[:passages])
        encoded.append(judge.encode(prompt))
    return encoded
