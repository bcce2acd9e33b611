"""Label rows become log entries."""

import pytest

from knowgate.errors import BadInput
from knowgate.history.entries import Known, Outcome, Scope, Source
from knowgate.labels.logbook import entries_of, time_sensitive_entries
from knowgate.runs.rows import GradedAnswer, LabelRow
from knowgate.types import Question

SCOPE = Scope("m", "p")


def row(correct=True, samples=(), **values):
    return LabelRow("1", "Who?", "en", closed=GradedAnswer("x", correct=correct, sample_correct=samples), **values)


def only(*rows, rule="greedy"):
    return list(entries_of(rows, SCOPE, rule))


def test_the_greedy_answer_decides_by_default():
    assert [e.label for e in only(row(True), row(False))] == [Known.KNOWN, Known.UNKNOWN]


def test_the_papers_rule_wants_every_sample_right():
    assert only(row(True, (True, True)), rule="all")[0].label == Known.KNOWN
    assert only(row(True, (True, False)), rule="all")[0].label == Known.UNKNOWN


def test_the_majority_rule_wants_more_than_half():
    assert only(row(True, (True, True, False)), rule="majority")[0].label == Known.KNOWN
    assert only(row(True, (True, False)), rule="majority")[0].label == Known.UNKNOWN


def test_rules_on_samples_need_samples():
    with pytest.raises(BadInput, match="--samples 10"):
        only(row(True), rule="all")


def test_benefit_becomes_the_outcome():
    found = only(row(benefit=1), row(benefit=0), row(benefit=-1), row())
    assert [e.outcome for e in found] == [Outcome.BETTER, Outcome.SAME, Outcome.WORSE, None]


@pytest.mark.parametrize("changing", [{"fact_type": "fast-changing"}, {"time_sensitive": True}])
def test_of_changing_facts_only_those_answered_wrongly_are_logged(changing):
    assert [e.label for e in only(row(False, meta=changing), row(True, meta=changing))] == [Known.TIME_SENSITIVE]


def test_a_fact_that_never_changes_is_logged_like_any_other():
    still = {"fact_type": "never-changing"}
    assert [e.label for e in only(row(False, meta=still), row(True, meta=still))] == [Known.UNKNOWN, Known.KNOWN]


def test_questions_marked_by_uars_time_criterion_are_logged_without_asking_anybody():
    def of(dataset, needed):
        return Question("Who leads now?", meta={"dataset": dataset, "need_retrieval_by_criterion": needed})

    asked = [of("uar_time_aware_valid", True), of("uar_time_aware_valid", False), of("uar_intent", True)]
    assert [e.label for e in time_sensitive_entries(asked, SCOPE)] == [Known.TIME_SENSITIVE]


def test_rows_without_a_verdict_and_failed_rows_are_left_out():
    assert only(row(None), LabelRow("2", "Why?", "en", error="bad")) == []


def test_a_judges_verdict_is_trusted_less_than_gold():
    judged, gold = only(row(grader="judge:implies:x"), row(grader="contains"))
    assert (judged.source, gold.source) == (Source.JUDGE, Source.GOLD)
    assert judged.trust < gold.trust
