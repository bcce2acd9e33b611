"""Offer a tool to an agent of Pydantic AI only if retrieval is needed (extra `pydantic-ai`).

Write `Tool(search, prepare=prepare_tool(decider))`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from knowgate.core.frameworks import check_framework_version
from knowgate.integrations.decider import DecisionCallback, cache_decisions


def prepare_tool(decider: Any, *, on_decision: DecisionCallback | None = None) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return the `prepare` argument of a `Tool`. The tool is offered only if the prompt needs retrieval.

    Args:
        decider: A `Decider` or an `AdaptiveRAG`.
        on_decision: Called with the question and its decision, once for each question.
    """
    check_framework_version("pydantic-ai-slim", "pydantic-ai", majors=("1", "2"))
    decide = cache_decisions(decider, on_decision)

    async def prepare(context: Any, tool: Any) -> Any:
        """Return the tool, or None if the prompt of the run needs no retrieval."""
        question = extract_prompt_text(context.prompt)
        if not question.strip():
            return tool
        decision = await asyncio.to_thread(decide, question)
        return tool if decision.retrieve else None

    return prepare


def extract_prompt_text(prompt: Any) -> str:
    """Return the text of a prompt, without images and other parts."""
    if isinstance(prompt, str):
        return prompt
    return " ".join(part for part in prompt or () if isinstance(part, str))
