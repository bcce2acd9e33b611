"""A fine-tuned judge as arbiter: one judge, shown both answers, is asked of each whether it is right."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np

from knowgate.arbiters.fitted import FittedArbiter
from knowgate.gates import ADAPTER_FOLDER, ExpectedTensors, Judge, JudgeOptions, open_judge
from knowgate.prompts import SIDES, arbiter_text
from knowgate.statistics import Floats
from knowgate.typed import Between, read_record
from knowgate.types import BothAnswers

if TYPE_CHECKING:
    from knowgate.models import MarkedTokens

ARBITER_PROMPTS, ARBITER_LABELS = "right", ("Yes", "No")


@dataclass(frozen=True, kw_only=True)
class LoraOptions(JudgeOptions):
    """tokens: of each answer. passages: how many of the passages are shown to the judge."""

    tokens: Annotated[int, Between(1, 1_000_000)]
    passages: Annotated[int, Between(0, 1_000)]


@dataclass(frozen=True, repr=False)
class LoraArbiter(FittedArbiter):
    """P(right) of each answer = P(Yes) / (P(Yes) + P(No)) of a judge that sees both and is asked about one.

    Needs: two texts; passages if it was fitted with them. Cost per question: two prefills of the judge (70 tokens and
    both answers) for each training; none where the answers agree.
    """

    def check(self, tensors: ExpectedTensors) -> None:
        read_record(LoraOptions, self.artefact.options, "options", others=True)

    @functools.cached_property
    def judge(self) -> Judge:
        return open_judge(self.artefact.path / ADAPTER_FOLDER, self.artefact.options, ARBITER_PROMPTS, self.llm)

    def raw(self, answers: Sequence[BothAnswers]) -> Floats:
        options = self.artefact.options
        known = [
            self.judge.known(arbiter_cuts(self.judge, answers, side, options["tokens"], options["passages"]))
            for side in SIDES
        ]
        found: Floats = np.stack(known, axis=1)
        return found


def arbiter_cuts(
    judge: Judge, answers: Sequence[BothAnswers], side: str, tokens: int, passages: int
) -> list[MarkedTokens]:
    """What the judge reads when it is asked about one side."""
    return [
        judge.encode(
            arbiter_text(
                both.question,
                judge.beginning(both.closed.text, tokens),
                judge.beginning(both.open.text, tokens),
                side,
                both.passages[:passages],
            )
        )
        for both in answers
    ]
