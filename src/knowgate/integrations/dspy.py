"""DSPy: a module that looks up only what it must, whose two predictors its optimisers can tune (extra `dspy`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from knowgate.core.frameworks import check_framework_version, check_result_list, wrap_errors
from knowgate.integrations.decider import as_decider
from knowgate.pipeline.answer_json import decision_record
from knowgate.types import Passage, Retriever

check_framework_version("dspy", "dspy", majors=("3", "2"))

import dspy  # noqa: E402

DEFAULT_K = 3


class KnowgateRAG(dspy.Module):
    """`question -> answer`, with `context` only where the gate says so. search: any callable that gives texts or
    passages for a question, or a retriever of knowgate's. The prediction has the decision under `knowgate`.

    Example:
        >>> program = KnowgateRAG(open_decider(), search=lambda question: [...])  # doctest: +SKIP
    """

    def __init__(
        self,
        decider: Any,
        search: Callable[[str], Any] | Retriever,
        *,
        direct: Any = None,
        informed: Any = None,
        k: int = DEFAULT_K,
    ):
        super().__init__()
        self.decider, self.search, self.k = as_decider(decider), search, k
        self.direct = direct or dspy.Predict("question -> answer")
        self.informed = informed or dspy.Predict("context, question -> answer")

    def forward(self, question: str) -> Any:
        decision = self.decider.decide(question)
        if decision.retrieve:
            made = self.informed(context=self.look_up(question), question=question)
        else:
            made = self.direct(question=question)
        made.knowgate = decision_record(decision)
        return made

    async def aforward(self, question: str) -> Any:
        decision = await self.decider.adecide(question)
        if decision.retrieve:
            context = await asyncio.to_thread(self.look_up, question)
            made = await self.informed.acall(context=context, question=question)
        else:
            made = await self.direct.acall(question=question)
        made.knowgate = decision_record(decision)
        return made

    def look_up(self, question: str) -> list[str]:
        """The texts that are shown to the LLM."""
        with wrap_errors("the search"):
            found = self.search(question) if callable(self.search) else self.search.search([question], self.k)[0]
        return [_text(one) for one in check_result_list(found, "the search", self.k)]


def _text(found: Any) -> str:
    if isinstance(found, Passage):
        return f"{found.title}: {found.text}" if found.title else found.text
    return str(getattr(found, "long_text", found))
