"""OpenAI Agents: `function_tool(is_enabled=enabled(decider))`: the tool is there only where something must be looked up
(extra `openai-agents`).

Tools are chosen before the SDK tells them what was asked, so the question comes in the run's context:
`Runner.run(agent, question, context={"question": question})`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from knowgate.core.frameworks import check_framework_version
from knowgate.errors import BadSetting
from knowgate.integrations.decider import as_decider
from knowgate.integrations.pydantic_ai import cache_decisions
from knowgate.types import Decision

QUESTION_KEY = "question"


def enable_tool(
    decider: Any,
    *,
    question: Callable[[Any], str] | None = None,
    told: Callable[[str, Decision], None] | None = None,
) -> Callable[[Any, Any], Awaitable[bool]]:
    """What `function_tool(is_enabled=...)` takes. told: hears of each decision once.

    question: finds it in the context of the run; by default that is a text, or has a `question`.
    """
    check_framework_version("openai-agents", "openai-agents", majors=("0",))
    decide, falls_open = cache_decisions(decider, told), as_decider(decider).fall_open

    async def is_enabled(context: Any, agent: Any) -> bool:
        asked = (question or _question)(context.context)
        if isinstance(asked, str) and asked.strip():
            return (await asyncio.to_thread(decide, asked)).retrieve
        if falls_open:
            return True
        raise BadSetting(
            "the context of the run holds no question: give it to Runner.run(agent, question, "
            "context={'question': question}), or say where it is: enabled(decider, question=...)."
        )

    return is_enabled


def _question(context: Any) -> Any:
    if isinstance(context, str):
        return context
    return context.get(QUESTION_KEY) if isinstance(context, Mapping) else getattr(context, QUESTION_KEY, None)
