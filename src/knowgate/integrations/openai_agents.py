"""Offer a tool to an agent of the OpenAI Agents SDK only if retrieval is needed (extra `openai-agents`).

Write `function_tool(is_enabled=enable_tool(decider))`. The SDK selects tools before they see the question, so you must
also put the question into the context of the run:
`Runner.run(agent, question, context={"question": question})`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from knowgate.core.frameworks import check_framework_version
from knowgate.errors import BadSetting
from knowgate.integrations.decider import DecisionCallback, as_decider, cache_decisions

QUESTION_KEY = "question"  # key or attribute of the question in the context of a run


def enable_tool(
    decider: Any, *, question: Callable[[Any], str] | None = None, on_decision: DecisionCallback | None = None
) -> Callable[[Any, Any], Awaitable[bool]]:
    """Return the `is_enabled` argument of a `function_tool`. It enables the tool only if the question needs retrieval.

    Args:
        decider: A `Decider` or an `AdaptiveRAG`.
        question: A function that returns the question from the context of the run. Default: the context itself if it
            is a text, else its key or attribute `question`.
        on_decision: Called with the question and its decision, once for each question.

    Returns:
        The function `is_enabled`. If the context contains no question, it raises BadSetting. With
        `Decider(..., fall_open=True)` it enables the tool instead.
    """
    check_framework_version("openai-agents", "openai-agents", majors=("0",))
    decide = cache_decisions(decider, on_decision)
    falls_open = as_decider(decider).fall_open
    get_question = question or _get_question

    async def is_enabled(context: Any, agent: Any) -> bool:
        """Return whether the question in the context of the run needs retrieval."""
        text = get_question(context.context)
        if isinstance(text, str) and text.strip():
            decision = await asyncio.to_thread(decide, text)
            return decision.retrieve
        if falls_open:
            return True
        advice = "Pass the question: Runner.run(..., context={'question': question}), or pass enable_tool(decider, question=...)."
        raise BadSetting(f"the context object of the agent run contains no question. {advice}")

    return is_enabled


def _get_question(context: Any) -> Any:
    """Return the question in the context of a run, or None. The context may be a text or object."""
    if isinstance(context, str):
        return context
    if isinstance(context, Mapping):
        return context.get(QUESTION_KEY)
    return getattr(context, QUESTION_KEY, None)
