"""Converts label rows to entries of the history log, with which the gates `dhicl` and `skr` compare questions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LabelSource, LogEntry, RetrievalOutcome
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.errors import BadInput
from knowgate.types import Question

OUTCOME_BY_BENEFIT = {1: RetrievalOutcome.BETTER, 0: RetrievalOutcome.SAME, -1: RetrievalOutcome.WORSE}
CHANGING_FACT_TYPES = ("fast-changing", "slow-changing")  # values of `fact_type` in FreshQA
UAR_TIME_PREFIX = "uar_time"  # data sets of UAR's time criterion
KnownRule = Literal["all", "greedy", "majority"]


def scope_from_settings(settings: dict[str, Any], tenant: str = "") -> HistoryScope:
    """Return the history scope (model, prompts, tenant) that the entries of a label run belong to."""
    return HistoryScope(settings["model_fingerprint"], settings["prompts_fingerprint"], tenant)


def entries_from_rows(rows: Iterable[LabelRow], scope: HistoryScope, rule: KnownRule = "greedy") -> Iterator[LogEntry]:
    """Yield a history entry for each graded row.

    Right answers to time-sensitive questions are skipped, as they may soon be outdated.

    Args:
        rows: Label rows; failed and ungraded ones are skipped.
        scope: Model, prompts and tenant of the entries.
        rule: When a question counts as known: 'greedy' (the greedy answer is right), 'all' (all sampled answers are
            right) or 'majority' (more than half of them are right).
    """
    for row in rows:
        label = _choose_label(row, rule)
        if label is not None:
            source = LabelSource.JUDGE if row.grader.startswith("judge") else LabelSource.GOLD
            outcome = None if row.benefit is None else OUTCOME_BY_BENEFIT[row.benefit]
            yield LogEntry(row.question, label, scope, source, outcome)


def _choose_label(row: LabelRow, rule: KnownRule) -> KnowledgeLabel | None:
    """Choose the label of a question in the history log. None means: do not log it."""
    if row.error is not None or row.closed is None:
        return None
    known = is_known(row.closed, rule)
    if known is None:
        return None
    if is_time_sensitive(row.meta):  # a right answer may soon be outdated, so it is not logged as known
        return None if known else KnowledgeLabel.TIME_SENSITIVE
    return KnowledgeLabel.KNOWN if known else KnowledgeLabel.UNKNOWN


def is_known(answer: GradedAnswer, rule: KnownRule) -> bool | None:
    """Return whether the LLM knows a question, by its closed-book answer. None means not graded.

    Args:
        answer: Closed-book answer with its samples and grades.
        rule: 'greedy' (the greedy answer is right), 'all' (all samples are right) or 'majority' (more than half are).

    Raises:
        BadInput: The rule needs graded samples, and the answer has none.
    """
    if rule == "greedy":
        return answer.correct
    grades = [correct for correct in answer.sample_correct if correct is not None]
    if not grades:
        raise BadInput(
            f"rule='{rule}' needs sampled answers, but the label run (recorded answers) has none. Label again with samples=10, "
            "or use rule='greedy'."
        )
    return all(grades) if rule == "all" else sum(grades) * 2 > len(grades)


def time_sensitive_entries(questions: Iterable[Question], scope: HistoryScope) -> Iterator[LogEntry]:
    """Yield a log entry for each time-sensitive question."""
    for question in questions:
        if is_time_sensitive(question.meta):
            yield LogEntry(question.text, KnowledgeLabel.TIME_SENSITIVE, scope, LabelSource.GOLD)


def is_time_sensitive(meta: Mapping[str, Any]) -> bool:
    """Return whether a question's metadata says that the answer changes over time.

    Data sets use different fields for this.
    """
    if meta.get("time_sensitive") or meta.get("fact_type") in CHANGING_FACT_TYPES:
        return True
    is_uar_time = str(meta.get("dataset", "")).startswith(UAR_TIME_PREFIX)
    return is_uar_time and bool(meta.get("need_retrieval_by_criterion"))
