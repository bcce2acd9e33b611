"""Labelled rows to log entries: what DH-ICL and SKR learn from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LabelSource, LogEntry, RetrievalOutcome
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.errors import BadInput
from knowgate.types import Question

OUTCOME_BY_BENEFIT = {1: RetrievalOutcome.BETTER, 0: RetrievalOutcome.SAME, -1: RetrievalOutcome.WORSE}
CHANGING_FACT_TYPES = ("fast-changing", "slow-changing")
UAR_TIME_PREFIX = "uar_time"  # how its sets begin
KnownRule = Literal["all", "greedy", "majority"]


def scope_from_settings(settings: dict[str, Any], tenant: str = "") -> HistoryScope:
    """The scope a run's labels count in."""
    return HistoryScope(settings["model_fingerprint"], settings["prompts_fingerprint"], tenant)


def entries_from_rows(rows: Iterable[LabelRow], scope: HistoryScope, rule: KnownRule = "greedy") -> Iterator[LogEntry]:
    """An entry per graded row. Rows without gold answers and failed ones have nothing to say.

    Of questions whose answer changes with time only those answered wrongly are logged (DH-ICL section 3.1): what was
    right when it was asked need not be tomorrow.
    """
    for row in rows:
        known = is_known(row.closed, rule) if row.error is None and row.closed is not None else None
        if known is not None and not (known and is_time_sensitive(row.meta)):
            outcome = None if row.benefit is None else OUTCOME_BY_BENEFIT[row.benefit]  # None: no open-book answer
            yield LogEntry(
                row.question, _label(row.meta, known), scope, source_from_grader(row.grader), outcome=outcome
            )


def is_known(side: GradedAnswer, rule: KnownRule) -> bool | None:
    """greedy: the greedy answer is right; all: every sample is (the paper's ten of ten); majority: most are."""
    if rule == "greedy":
        return side.correct
    graded = [verdict for verdict in side.sample_correct if verdict is not None]
    if not graded:
        raise BadInput(f"the rule '{rule}' needs sampled answers; label with --samples 10, or use --rule greedy.")
    return all(graded) if rule == "all" else sum(graded) * 2 > len(graded)


def source_from_grader(grader: str) -> LabelSource:
    return LabelSource.JUDGE if grader.startswith("judge") else LabelSource.GOLD


def time_sensitive_entries(questions: Iterable[Question], scope: HistoryScope) -> Iterator[LogEntry]:
    """Questions that are said to change with time; nobody was asked, so none of them is known to be answered right."""
    for question in questions:
        if is_time_sensitive(question.meta):
            yield LogEntry(question.text, KnowledgeLabel.TIME_SENSITIVE, scope, LabelSource.GOLD)


def is_time_sensitive(meta: Mapping[str, Any]) -> bool:
    """Whether a data set says that the answer changes with time: FreshQA, UAR's time criterion, or a mark of yours."""
    by_criterion = str(meta.get("dataset", "")).startswith(UAR_TIME_PREFIX) and bool(
        meta.get("need_retrieval_by_criterion")
    )
    return meta.get("fact_type") in CHANGING_FACT_TYPES or bool(meta.get("time_sensitive")) or by_criterion


def _label(meta: Mapping[str, Any], known: bool) -> KnowledgeLabel:
    if known:
        return KnowledgeLabel.KNOWN
    return KnowledgeLabel.TIME_SENSITIVE if is_time_sensitive(meta) else KnowledgeLabel.UNKNOWN
