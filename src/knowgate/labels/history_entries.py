"""History entries from label rows: the examples that the gates `dhicl` and `skr` compare questions with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LabelSource, LogEntry, RetrievalOutcome
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.errors import BadInput
from knowgate.types import Question

OUTCOME_BY_BENEFIT = {1: RetrievalOutcome.BETTER, 0: RetrievalOutcome.SAME, -1: RetrievalOutcome.WORSE}
CHANGING_FACT_TYPES = ("fast-changing", "slow-changing")
UAR_TIME_PREFIX = "uar_time"  # data sets of UAR's time criterion
KnownRule = Literal["all", "greedy", "majority"]


def scope_from_settings(settings: dict[str, Any], tenant: str = "") -> HistoryScope:
    """Return the history scope of a label run: its model and prompts."""
    return HistoryScope(settings["model_fingerprint"], settings["prompts_fingerprint"], tenant)


def entries_from_rows(rows: Iterable[LabelRow], scope: HistoryScope, rule: KnownRule = "greedy") -> Iterator[LogEntry]:
    """Yield a history entry for each graded row.

    Time-sensitive questions are logged only if the answer was wrong (DH-ICL, section 3.1): an answer that was right
    when it was labeled may be wrong tomorrow.

    Args:
        rows: Label rows; failed and ungraded ones are skipped.
        scope: Model, prompts and tenant of the entries.
        rule: When a question counts as known: the greedy answer is right, all samples are, or most are.
    """
    for row in rows:
        known = is_known(row.closed, rule) if row.error is None and row.closed is not None else None
        if known is None or (known and is_time_sensitive(row.meta)):
            continue
        outcome = None if row.benefit is None else OUTCOME_BY_BENEFIT[row.benefit]
        yield LogEntry(row.question, _get_label(row.meta, known), scope, source_from_grader(row.grader), outcome)


def is_known(answer: GradedAnswer, rule: KnownRule) -> bool | None:
    """Return whether an answer counts as known under a rule; None if it was not graded."""
    if rule == "greedy":
        return answer.correct
    grades = [correct for correct in answer.sample_correct if correct is not None]
    if not grades:
        raise BadInput(f"rule='{rule}' needs sampled answers. Label with samples=10, or use rule='greedy'.")
    return all(grades) if rule == "all" else sum(grades) * 2 > len(grades)


def source_from_grader(grader: str) -> LabelSource:
    """Return the label source that a grader stands for."""
    return LabelSource.JUDGE if grader.startswith("judge") else LabelSource.GOLD


def time_sensitive_entries(questions: Iterable[Question], scope: HistoryScope) -> Iterator[LogEntry]:
    """Yield entries for the questions that their data marks as time-sensitive; no LLM is asked."""
    for question in questions:
        if is_time_sensitive(question.meta):
            yield LogEntry(question.text, KnowledgeLabel.TIME_SENSITIVE, scope, LabelSource.GOLD)


def is_time_sensitive(meta: Mapping[str, Any]) -> bool:
    """Return whether a data set says that the answer changes: FreshQA, UAR's time criterion, or `time_sensitive`."""
    by_criterion = str(meta.get("dataset", "")).startswith(UAR_TIME_PREFIX) and bool(
        meta.get("need_retrieval_by_criterion")
    )
    return meta.get("fact_type") in CHANGING_FACT_TYPES or bool(meta.get("time_sensitive")) or by_criterion


def _get_label(meta: Mapping[str, Any], known: bool) -> KnowledgeLabel:
    if known:
        return KnowledgeLabel.KNOWN
    return KnowledgeLabel.TIME_SENSITIVE if is_time_sensitive(meta) else KnowledgeLabel.UNKNOWN
