"""What traffic says about the LLM, as labels for the history that dhicl and skr learn from.

Two answers that agree are a weak sign that it knows, two that do not that it does not. What people say outranks them. A
skipped question with one answer only gets no label: a skip never labels itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from knowgate.arbiters import RULES
from knowgate.evaluation import agrees
from knowgate.history import Known


def differ(closed: str, opened: str) -> bool:
    """Whether skipping gives another answer. No answer, or that the LLM cannot tell, is none to agree on."""
    return RULES.abstains(closed) or not agrees(closed, opened)


def by_agreement(closed: str, opened: str) -> Known:
    return Known.UNKNOWN if differ(closed, opened) else Known.KNOWN


def by_feedback(rating: str, correction: str | None, found: Mapping[str, Any]) -> Known | None:
    """What a thumb or a correction says about the LLM; None where it says nothing.

    found: `closed` and `opened`, the answers as far as they are known, and `retrieved`. A thumb is about the answer
    that was given: one with passages tells of the LLM only if the other answer is known, too.
    """
    closed, opened, retrieved = found.get("closed"), found.get("opened"), found.get("retrieved")
    if correction and closed is not None:
        return by_agreement(closed, correction)
    if not retrieved:
        return Known.KNOWN if rating == "up" else Known.UNKNOWN
    if rating == "up" and closed is not None and opened is not None:
        return by_agreement(closed, opened)
    return None
