"""Pydantic AI: `Tool(search, prepare=prepare(decider))`: the tool is offered only where something must be looked up
(extra `pydantic-ai`)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from knowgate.integrations.decider import as_decider
from knowgate.integrations.guests import check_framework
from knowgate.types import Decision

REMEMBERED = 256  # questions that are not decided on again in the steps of a run


def prepare(
    decider: Any, *, told: Callable[[str, Decision], None] | None = None
) -> Callable[[Any, Any], Awaitable[Any]]:
    """What `Tool(prepare=...)` takes. told: hears of each decision once.

    Decided on the prompt of the run; a run without one, that goes on from messages, keeps its tools.
    """
    check_framework("pydantic-ai-slim", "pydantic-ai", majors=("1", "2"))
    decide = remembering(decider, told)

    async def prepared(ctx: Any, tool: Any) -> Any:
        question = prompt_text(ctx.prompt)
        if not question.strip():
            return tool
        decision = await asyncio.to_thread(decide, question)
        return tool if decision.retrieve else None

    return prepared


def remembering(decider: Any, told: Callable[[str, Decision], None] | None) -> Callable[[str], Decision]:
    """Decides on each question once: frameworks ask again at every step of a run."""
    chosen = as_decider(decider)

    @functools.lru_cache(maxsize=REMEMBERED)
    def decide(question: str) -> Decision:
        decision = chosen.decide(question)
        if told is not None:
            told(question, decision)
        return decision

    return decide


def prompt_text(prompt: Any) -> str:
    """The words of a prompt; pictures and the like are no part of the question."""
    if isinstance(prompt, str):
        return prompt
    return " ".join(part for part in prompt or () if isinstance(part, str))
