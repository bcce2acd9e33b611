"""A DSPy module that retrieves only if needed (extra `dspy`). DSPy's optimizers can tune its two predictors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from knowgate.core.frameworks import check_framework_version, check_result_list, wrap_errors
from knowgate.integrations.decider import as_decider
from knowgate.pipeline.answer_json import decision_record
from knowgate.types import Decision, Passage, Retriever

check_framework_version("dspy", "dspy", majors=("3", "2"))

import dspy  # noqa: E402

DEFAULT_K = 3  # passages in the context


class KnowgateRAG(dspy.Module):
    """DSPy module for questions and answers.

    It searches for context only if the gate decides to retrieve. `knowgate` in the prediction is the decision.

    Args:
        decider: A `Decider` or an `AdaptiveRAG`.
        search: A knowgate retriever, or a function that returns texts or passages for a question.
        direct: The predictor without context. Default: `dspy.Predict("question -> answer")`.
        informed: The predictor with context. Default: `dspy.Predict("context, question -> answer")`.
        k: The maximum number of passages in the context.

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
        self.decider = as_decider(decider)
        self.source = search  # a function that searches, or a retriever
        self.k = k
        self.direct = direct or dspy.Predict("question -> answer")
        self.informed = informed or dspy.Predict("context, question -> answer")

    def forward(self, question: str) -> Any:
        """Answer a question; called by DSPy."""
        decision = self.decider.decide(question)
        if decision.retrieve:
            prediction = self.informed(context=self.retrieve(question), question=question)
        else:
            prediction = self.direct(question=question)
        return _add_decision(prediction, decision)

    async def aforward(self, question: str) -> Any:
        """Answer a question asynchronously; called by DSPy."""
        decision = await self.decider.adecide(question)
        if decision.retrieve:
            context = await asyncio.to_thread(self.retrieve, question)
            prediction = await self.informed.acall(context=context, question=question)
        else:
            prediction = await self.direct.acall(question=question)
        return _add_decision(prediction, decision)

    def retrieve(self, question: str) -> list[str]:
        """Search for a question and return up to `k` texts for the context."""
        with wrap_errors("the search"):
            results = self.source(question) if callable(self.source) else self.source.search([question], self.k)[0]
        return [_get_text(result) for result in check_result_list(results, "the search", self.k)]


def _add_decision(prediction: Any, decision: Decision) -> Any:
    """Store the decision in the field `knowgate` of a prediction and return the prediction."""
    prediction.knowgate = decision_record(decision)
    return prediction


def _get_text(result: Any) -> str:
    """Return the text of a search result, such as a passage or a string."""
    if isinstance(result, Passage):
        return f"{result.title}: {result.text}" if result.title else result.text
    return str(getattr(result, "long_text", result))
