"""Label rows become history entries."""

import pytest

from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LabelSource, RetrievalOutcome
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.errors import BadInput
from knowgate.labels.history_entries import entries_from_rows, time_sensitive_entries
from knowgate.types import Question

SCOPE = HistoryScope("m", "p")


def row(correct=True, samples=(), **values):
    return LabelRow("1", "Who?", "en", closed=GradedAnswer("x", correct=correct, sample_correct=samples), **values)


def only(*rows, rule="greedy"):
    return list(entries_from_rows(rows, SCOPE, rule))


def test_the_greedy_answer_decides_by_default():
    assert [e.label for e in only(row(True), row(False))] == [KnowledgeLabel.KNOWN, KnowledgeLabel.UNKNOWN]


def test_the_rule_all_needs_every_sample_to_be_right():
    assert only(row(True, (True, True)), rule="all")[0].label == KnowledgeLabel.KNOWN
    assert only(row(True, (True, False)), rule="all")[0].label == KnowledgeLabel.UNKNOWN


def test_the_rule_majority_needs_more_than_half():
    assert only(row(True, (True, True, False)), rule="majority")[0].label == KnowledgeLabel.KNOWN
    assert only(row(True, (True, False)), rule="majority")[0].label == KnowledgeLabel.UNKNOWN


def test_rules_on_samples_need_samples():
    with pytest.raises(BadInput, match="samples=10"):
        only(row(True), rule="all")


def test_benefit_becomes_the_outcome():
    found = only(row(benefit=1), row(benefit=0), row(benefit=-1), row())
    assert [e.outcome for e in found] == [RetrievalOutcome.BETTER, RetrievalOutcome.SAME, RetrievalOutcome.WORSE, None]


@pytest.mark.parametrize("changing", [{"fact_type": "fast-changing"}, {"time_sensitive": True}])
def test_time_sensitive_questions_are_logged_only_if_answered_wrong(changing):
    assert [e.label for e in only(row(False, meta=changing), row(True, meta=changing))] == [
        KnowledgeLabel.TIME_SENSITIVE
    ]


def test_a_fact_that_never_changes_is_logged_like_any_other():
    still = {"fact_type": "never-changing"}
    assert [e.label for e in only(row(False, meta=still), row(True, meta=still))] == [
        KnowledgeLabel.UNKNOWN,
        KnowledgeLabel.KNOWN,
    ]


def test_questions_marked_by_the_uar_time_criterion_are_time_sensitive():
    def of(dataset, needed):
        return Question("Who leads now?", meta={"dataset": dataset, "need_retrieval_by_criterion": needed})

    asked = [of("uar_time_aware_valid", True), of("uar_time_aware_valid", False), of("uar_intent", True)]
    assert [e.label for e in time_sensitive_entries(asked, SCOPE)] == [KnowledgeLabel.TIME_SENSITIVE]


def test_rows_without_a_verdict_and_failed_rows_are_left_out():
    assert only(row(None), LabelRow("2", "Why?", "en", error="bad")) == []


def test_a_judges_verdict_is_trusted_less_than_gold():
    judged, gold = only(row(grader="judge:implies:x"), row(grader="contains"))
    assert (judged.source, gold.source) == (LabelSource.JUDGE, LabelSource.GOLD)
    assert judged.trust < gold.trust
