"""Number of tokens of calls to an LLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TokenUsage:
    """Tokens that an LLM read and generated."""

    prompt: int = 0
    completion: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the field `usage` of a chat completion."""
        total = self.prompt + self.completion
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": total}

    def add_to(self, reply: dict[str, Any]) -> None:
        """Add these tokens to the field `usage` of a reply or of a chunk of a stream, if it has one."""
        container = reply.get("response") if isinstance(reply.get("response"), dict) else reply
        usage = container.get("usage") if isinstance(container, dict) else None
        if not isinstance(usage, dict):
            return
        amounts = {
            **dict.fromkeys(("prompt_tokens", "input_tokens"), self.prompt),
            **dict.fromkeys(("completion_tokens", "output_tokens"), self.completion),
            "total_tokens": self.prompt + self.completion,
        }
        for name, amount in amounts.items():
            if isinstance(usage.get(name), int):
                usage[name] += amount
