"""Rules come before the score: what they say takes the place of the gate's decision, and is its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from knowgate.pipeline.case import Case
from knowgate.rules import RuleBook


def overrule(rules: RuleBook, cases: Sequence[Case]) -> None:
    """Decide the cases that a rule fits; the need stays what the gate found."""
    for case in cases:
        ruling = rules.judge(case.question.text)
        if ruling is not None and case.decision is not None:
            reason = f"{ruling.reason} (rule '{ruling.rule}')"
            case.decision = replace(case.decision, retrieve=ruling.retrieve, reason=reason, rule=ruling.rule)
