"""OpenAI Agents: `function_tool(is_enabled=enable_tool(decider))` offers a tool only if retrieval is needed
(extra `openai-agents`).

The SDK selects tools before it passes the question to them, so the question must be in the context of the run:
`Runner.run(agent, question, context={"question": question})`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from knowgate.core.frameworks import check_framework_version
from knowgate.errors import BadSetting
from knowgate.integrations.decider import DecisionCallback, as_decider, cache_decisions

QUESTION_KEY = "question"


def enable_tool(
    decider: Any, *, question: Callable[[Any], str] | None = None, on_decision: DecisionCallback | None = None
) -> Callable[[Any, Any], Awaitable[bool]]:
    """Make the `is_enabled` argument of a `function_tool`.

    Args:
        decider: A `Decider` or an `AdaptiveRAG`.
        question: Gets the question from the context of the run. By default the context is a text, or has a `question`.
        on_decision: Called with the question and its decision, once for each question.
    """
    check_framework_version("openai-agents", "openai-agents", majors=("0",))
    decide, falls_open = cache_decisions(decider, on_decision), as_decider(decider).fall_open

    async def is_enabled(context: Any, agent: Any) -> bool:
        text = (question or _get_question)(context.context)
        if isinstance(text, str) and text.strip():
            return (await asyncio.to_thread(decide, text)).retrieve
        if falls_open:
            return True
        raise BadSetting(
            "the context of the run contains no question. Pass it to Runner.run(agent, question, "
            "context={'question': question}), or say where it is: enable_tool(decider, question=...)."
        )

    return is_enabled


def _get_question(context: Any) -> Any:
    if isinstance(context, str):
        return context
    return context.get(QUESTION_KEY) if isinstance(context, Mapping) else getattr(context, QUESTION_KEY, None)
