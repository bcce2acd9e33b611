"""What a check-up finds: one line each, with what to type where something is missing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the check-up. `advice` is what to type; empty when all is well. minor: told only when all is."""

    what: str
    state: str
    advice: str = ""
    broken: bool = False
    minor: bool = False
