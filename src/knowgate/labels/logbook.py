"""Labelled rows to log entries: what DH-ICL and SKR learn from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from knowgate.errors import BadInput
from knowgate.history import Known, LogEntry, Outcome, Scope, Source
from knowgate.runs import GradedAnswer, LabelRow

OUTCOMES = {1: Outcome.BETTER, 0: Outcome.SAME, -1: Outcome.WORSE}
FAST_CHANGING = ("fast-changing", "slow-changing")
Rule = Literal["all", "greedy", "majority"]


def scope_of(settings: dict[str, Any], tenant: str = "") -> Scope:
    """The scope a run's labels count in."""
    return Scope(settings["model_fingerprint"], settings["prompts_fingerprint"], tenant)


def entries_of(rows: Iterable[LabelRow], scope: Scope, rule: Rule = "greedy") -> Iterator[LogEntry]:
    """An entry per graded row. Rows without gold answers and failed ones have nothing to say."""
    for row in rows:
        known = is_known(row.closed, rule) if row.error is None and row.closed is not None else None
        if known is not None:
            outcome = None if row.benefit is None else OUTCOMES[row.benefit]  # None: no open-book answer
            yield LogEntry(row.question, _label(row, known), scope, source_of(row.grader), outcome=outcome)


def is_known(side: GradedAnswer, rule: Rule) -> bool | None:
    """greedy: the greedy answer is right; all: every sample is (the paper's ten of ten); majority: most are."""
    if rule == "greedy":
        return side.correct
    graded = [verdict for verdict in side.sample_correct if verdict is not None]
    if not graded:
        raise BadInput(f"the rule '{rule}' needs sampled answers; label with --samples 10, or use --rule greedy.")
    return all(graded) if rule == "all" else sum(graded) * 2 > len(graded)


def source_of(grader: str) -> Source:
    return Source.JUDGE if grader.startswith("judge") else Source.GOLD


def _label(row: LabelRow, known: bool) -> Known:
    """What changes with time is not known, whatever the answer was (section 3.1: those answered wrongly)."""
    changing = row.meta.get("fact_type") in FAST_CHANGING or bool(row.meta.get("time_sensitive"))
    if changing and not known:
        return Known.TIME_SENSITIVE
    return Known.KNOWN if known else Known.UNKNOWN
