"""How to label, by the names of what it takes: what is sent to other machines, where a labeller is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from knowgate.labels.grading import load_grader
from knowgate.labels.labeller import LabelledBatch, Labeller
from knowgate.labels.plan import Plan
from knowgate.models import load_model
from knowgate.prompts import AnswerPrompts
from knowgate.rerank import as_reranker
from knowgate.types import Question, Retriever


@dataclass(frozen=True)
class LabelRecipe:
    """Names of the LLM, the grader, the index and the reranker, with the plan and the wording as they are."""

    model: str
    grade: str
    judge: str | None
    judge_prompt: Literal["contains", "implies"]
    plan: Plan
    prompts: AnswerPrompts
    index: str | None = None
    rerank: str | None = None

    def make(self, retriever: Retriever | None) -> ReadyLabeller:
        judge = load_model(self.judge) if self.judge is not None else None
        grader = load_grader(self.grade, judge, self.judge_prompt)
        reranker = as_reranker(self.rerank) if self.rerank is not None else None
        made = Labeller(load_model(self.model), grader, self.plan, self.prompts, retriever, reranker)
        return ReadyLabeller(made)


@dataclass(frozen=True)
class ReadyLabeller:
    """A labeller on the machine where it works."""

    labeller: Labeller

    @property
    def identity(self) -> dict[str, str]:
        return identity(self.labeller)

    def __call__(self, questions: Sequence[Question]) -> LabelledBatch:
        return self.labeller.label(questions)


def identity(labeller: Labeller) -> dict[str, str]:
    """Which LLM, wording, index and reranker rows are made with."""
    parts = {"index": labeller.retriever, "reranker": labeller.reranker}
    told = {"model": labeller.model.fingerprint, "wording": labeller.prompts.fingerprint}
    return told | {name: part.fingerprint for name, part in parts.items() if part is not None}
