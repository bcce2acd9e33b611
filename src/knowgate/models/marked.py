"""Tokens of a prompt and the places in them where a label is expected. Plain numbers; no model, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MarkedTokens:
    """A tokenised prompt: from the positions `marks` labels are predicted; `prefix` tokens are shared by many."""

    ids: list[int]
    marks: list[int]
    prefix: int = 0
