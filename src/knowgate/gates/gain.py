"""What a search would gain: a judge of answers is also asked whether documents would give a right one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.gates.fitted.answers import AnswerJudge, AnswerOptions, answer_cuts, gain_needs, open_answer_judge
from knowgate.gates.fitted.base import FittedGate
from knowgate.gates.fitted.probability import Floats
from knowgate.gates.fitted.tensors import ExpectedTensors
from knowgate.signals import draft_texts
from knowgate.typed import read_record
from knowgate.types import Question, Reading

ASKED = ("judge", "search")


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

    def check(self, tensors: ExpectedTensors) -> None:
        read_record(AnswerOptions, self.artefact.options, "options", others=True)
        tensors.finish()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        tokens, texts = int(self.artefact.options["tokens"]), draft_texts(readings)
        known, found = (self.judge.known(answer_cuts(asked, self.judge, questions, texts, tokens)) for asked in ASKED)
        return gain_needs(known, found)

    @functools.cached_property
    def judge(self) -> AnswerJudge:
        return open_answer_judge("judge", self.artefact.path, self.artefact.options, self.llm)
