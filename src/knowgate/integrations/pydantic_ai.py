"""Pydantic AI: `Tool(search, prepare=prepare(decider))`: the tool is offered only where something must be looked up
(extra `pydantic-ai`)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from knowgate.core.frameworks import check_framework_version
from knowgate.integrations.decider import as_decider
from knowgate.types import Decision

MAX_CACHED_DECISIONS = 256  # questions that are not decided on again in the steps of a run


def prepare_tool(
    decider: Any, *, told: Callable[[str, Decision], None] | None = None
) -> Callable[[Any, Any], Awaitable[Any]]:
    """What `Tool(prepare=...)` takes. told: hears of each decision once.

    Decided on the prompt of the run; a run without one, that goes on from messages, keeps its tools.
    """
    check_framework_version("pydantic-ai-slim", "pydantic-ai", majors=("1", "2"))
    decide = cache_decisions(decider, told)

    async def prepared(ctx: Any, tool: Any) -> Any:
        question = extract_prompt_text(ctx.prompt)
        if not question.strip():
            return tool
        decision = await asyncio.to_thread(decide, question)
        return tool if decision.retrieve else None

    return prepared


def cache_decisions(decider: Any, told: Callable[[str, Decision], None] | None) -> Callable[[str], Decision]:
    """Decides on each question once: frameworks ask again at every step of a run."""
    chosen = as_decider(decider)

    @functools.lru_cache(maxsize=MAX_CACHED_DECISIONS)
    def decide(question: str) -> Decision:
        decision = chosen.decide(question)
        if told is not None:
            told(question, decision)
        return decision

    return decide


def extract_prompt_text(prompt: Any) -> str:
    """The words of a prompt; pictures and the like are no part of the question."""
    if isinstance(prompt, str):
        return prompt
    return " ".join(part for part in prompt or () if isinstance(part, str))
