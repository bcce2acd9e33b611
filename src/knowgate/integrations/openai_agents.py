"""OpenAI Agents: `function_tool(is_enabled=enabled(decider))`: the tool is there only where something must be looked up
(extra `openai-agents`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from knowgate.integrations.guests import check_framework
from knowgate.integrations.pydantic_ai import remembering
from knowgate.types import Decision


def enabled(decider: Any, *, told: Callable[[str, Decision], None] | None = None) -> Callable[[Any, Any], Awaitable[bool]]:
    """What `function_tool(is_enabled=...)` takes. told: hears of each decision once.

    Decided on the last thing the user said; where nothing was, the tool is there.
    """
    check_framework("openai-agents", "openai-agents", majors=("0",))
    decide = remembering(decider, told)

    async def is_enabled(context: Any, agent: Any) -> bool:
        question = last_said(getattr(context, "turn_input", None) or ())
        if not question.strip():
            return True
        return (await asyncio.to_thread(decide, question)).retrieve

    return is_enabled


def last_said(items: Sequence[Any] | str) -> str:
    """The text of the user's last message."""
    if isinstance(items, str):
        return items
    for item in reversed(items):
        if isinstance(item, Mapping) and item.get("role") == "user":
            content = item.get("content")
            if isinstance(content, str):
                return content
            parts = content if isinstance(content, list) else []
            return " ".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
    return ""
