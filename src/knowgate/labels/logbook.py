"""Labelled rows to log entries: what DH-ICL and SKR learn from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from knowgate.errors import BadInput
from knowgate.history import Known, LogEntry, Outcome, Scope, Source
from knowgate.runs import GradedAnswer, LabelRow
from knowgate.types import Question

OUTCOMES = {1: Outcome.BETTER, 0: Outcome.SAME, -1: Outcome.WORSE}
FAST_CHANGING = ("fast-changing", "slow-changing")
UAR_TIME = "uar_time"  # how its sets begin
Rule = Literal["all", "greedy", "majority"]


def scope_of(settings: dict[str, Any], tenant: str = "") -> Scope:
    """The scope a run's labels count in."""
    return Scope(settings["model_fingerprint"], settings["prompts_fingerprint"], tenant)


def entries_of(rows: Iterable[LabelRow], scope: Scope, rule: Rule = "greedy") -> Iterator[LogEntry]:
    """An entry per graded row. Rows without gold answers and failed ones have nothing to say.

    Of questions whose answer changes with time only those answered wrongly are logged (DH-ICL section 3.1): what was
    right when it was asked need not be tomorrow.
    """
    for row in rows:
        known = is_known(row.closed, rule) if row.error is None and row.closed is not None else None
        if known is not None and not (known and is_changing(row.meta)):
            outcome = None if row.benefit is None else OUTCOMES[row.benefit]  # None: no open-book answer
            yield LogEntry(row.question, _label(row.meta, known), scope, source_of(row.grader), outcome=outcome)


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


def time_sensitive_entries(questions: Iterable[Question], scope: Scope) -> Iterator[LogEntry]:
    """Questions that are said to change with time; nobody was asked, so none of them is known to be answered right."""
    for question in questions:
        if is_changing(question.meta):
            yield LogEntry(question.text, Known.TIME_SENSITIVE, scope, Source.GOLD)


def is_changing(meta: Mapping[str, Any]) -> bool:
    """Whether a data set says that the answer changes with time: FreshQA, UAR's time criterion, or a mark of yours."""
    by_criterion = str(meta.get("dataset", "")).startswith(UAR_TIME) and bool(meta.get("need_retrieval_by_criterion"))
    return meta.get("fact_type") in FAST_CHANGING or bool(meta.get("time_sensitive")) or by_criterion


def _label(meta: Mapping[str, Any], known: bool) -> Known:
    if known:
        return Known.KNOWN
    return Known.TIME_SENSITIVE if is_changing(meta) else Known.UNKNOWN
