"""The tool gate: the LLM is offered a search tool and decides itself whether to call it, as agent frameworks do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.models.tools import TOOL_CALL
from knowgate.types import Gate, Question, Reading, Signal


@dataclass(frozen=True)
class ToolGate(Gate):
    """Retrieves if the LLM calls a search tool that it is offered.

    Local models are asked with the tools of their chat template; the need for retrieval is the probability that the
    answer begins with a tool call. OpenAI-compatible servers are sent the field `tools`; the need is 1 if the response
    contains a call, otherwise 0. LLMs whose template or server has no tools are rejected.

    Needs: tools. Cost per question: one prefill of about 200 tokens; on a server one LLM call.
    Reference: Schick et al. 2023 (Toolformer); the default of agent frameworks.

    Example:
        >>> ToolGate().score([Question("?")], [Reading(signals={"tool_call": 0.8})])
        [0.8]
    """

    needs = frozenset({Signal.TOOLS})
    is_pure = True

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Return the probability of a tool call as the need for retrieval."""
        return [reading.signals[TOOL_CALL] for reading in readings]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Say how probably the LLM calls the search tool."""
        return [f"the LLM calls the search tool with probability {item.signals[TOOL_CALL]:.2f}" for item in readings]
