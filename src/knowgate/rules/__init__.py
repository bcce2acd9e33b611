"""Rules above the score: what is looked up, or never looked up, whatever a gate says. The first that fits decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.rules.rule import Action, Rule, Ruling
    from knowgate.rules.rule_book import RuleBook, load_rules
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "Action",
    "Rule",
    "RuleBook",
    "Ruling",
    "load_rules",
]
