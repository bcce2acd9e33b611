"""Logs read into events: what counts, what is counted as bad, and label runs as logs."""

import gzip
import json
import math
from collections import Counter

import pytest

from knowgate.errors import BadInput
from knowgate.evaluation.replay import Prices, Traffic, replay_traffic
from knowgate.evaluation.traffic_log import LoggedTraffic, parse_event, read_label_run_traffic, read_traffic_log
from knowgate.gates.arbiters.abstention import answers_agree
from tests.support.hand_gate import graded_row, write_gate, write_rows

SKIPPED = {
    "question": "who wrote it?",
    "answer": "Ann",
    "retrieve": False,
    "need": 0.2,
    "threshold": 0.5,
    "gate": "fusion",
    "model": "m",
    "passages": [],
    "seconds": {"read": 1.0, "gate": 0.5, "answer": 2.0, "total": 3.5},
    "tokens": {"draft": 4, "answer": 10, "closed_prompt": 30},
}
RETRIEVED = {
    **SKIPPED,
    "answer": "It was Bob.",
    "retrieve": True,
    "need": 0.8,
    "passages": [{"id": "p", "title": "", "text": "Bob wrote it."}],
    "seconds": {"read": 1.0, "gate": 0.5, "retrieve": 0.25, "answer": 3.0, "total": 4.75},
    "tokens": {"draft": 4, "answer": 6, "closed_prompt": 30, "open_prompt": 80},
    "draft": "Ann",
}
DECIDED = {key: SKIPPED[key] for key in ("question", "retrieve", "need", "threshold", "gate", "model")}


def write_log(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def costs(cost):
    return (cost.seconds, cost.prompt, cost.completion)


# --- one line -------------------------------------------------------------------------------------


def test_a_skipped_record_holds_the_costs_of_reading_and_answering():
    event = parse_event(SKIPPED)
    assert costs(event.decision_cost) == (1.5, 30, 4)
    assert costs(event.cost_if_skipped) == (2.0, 0, 6)
    assert math.isnan(event.cost_if_retrieved.seconds)
    assert event.loses_answer is None


def test_a_rule_decides_the_same_at_every_threshold():
    assert parse_event({**SKIPPED, "need": 0.9, "rule": "thanks"}).need == -math.inf
    assert parse_event({**RETRIEVED, "need": 0.1, "rule": "fresh events"}).need == math.inf
    # In shadow mode, a search follows although the rule skips it.
    shadow = {**RETRIEVED, "need": 0.1, "rule": "thanks", "notes": ["would skip"]}
    assert parse_event(shadow).need == -math.inf


@pytest.mark.parametrize(
    ("gate", "threshold", "decision"),
    [
        ("always", 0.5, "always retrieves"),
        ("never", 0.5, "never retrieves"),
        ("constant", -1.0, "always retrieves"),
        ("constant", 1.0, "never retrieves"),
        ("prompt", 0.5, ""),
    ],
)
def test_a_gate_that_decides_the_same_for_every_question_is_recognized(gate, threshold, decision):
    log = LoggedTraffic("log", gates=Counter([gate]), thresholds=Counter([threshold]))
    assert log.constant_decision == decision


def test_empty_questions_are_not_traffic(tmp_path):
    log = read_traffic_log(
        write_log(tmp_path / "log", {"id": "1", "question": "", "skipped": "the line is empty"}, SKIPPED)
    )
    assert (len(log.events), log.bad_lines) == (1, {})


def test_questions_of_a_batch_have_no_times():
    batch = {key: value for key, value in SKIPPED.items() if key != "seconds"} | {"batch": 4}
    assert math.isnan(parse_event(batch).decision_cost.seconds)


def test_a_retrieved_record_holds_the_cost_of_searching():
    event = parse_event(RETRIEVED)
    assert costs(event.cost_if_retrieved) == (3.25, 80, 6)
    assert costs(event.cost_if_skipped) == (0, 0, 0)  # the draft is the whole closed-book answer


def test_a_retrieved_record_without_a_full_draft_has_no_closed_book_cost():
    event = parse_event({key: value for key, value in RETRIEVED.items() if key != "draft"})
    assert math.isnan(event.cost_if_skipped.seconds)
    assert event.loses_answer is None


def test_draft_and_answer_that_disagree_are_a_loss():
    assert parse_event(RETRIEVED).loses_answer is True
    assert parse_event({**RETRIEVED, "draft": "bob"}).loses_answer is False


def test_an_audited_skip_is_compared_with_its_audit():
    assert parse_event({**SKIPPED, "audit": "Bob"}).loses_answer is True
    assert parse_event({**SKIPPED, "audit": "It was Ann."}).loses_answer is False


def test_two_answers_that_abstain_are_equal():
    retrieved = {**RETRIEVED, "draft": "I don't know.", "answer": "The passages do not mention it."}
    skipped = {**SKIPPED, "answer": "I don't know.", "audit": "The passages do not mention it."}
    assert [parse_event(record).loses_answer for record in (retrieved, skipped)] == [False, False]
    assert parse_event({**skipped, "audit": "Bob"}).loses_answer is True


def test_a_record_without_passages_has_only_one_answer():
    assert parse_event({**RETRIEVED, "passages": []}).loses_answer is None


def test_a_decision_alone_has_a_need_and_no_costs():
    event = parse_event(DECIDED)
    assert (event.need, event.retrieved, math.isnan(event.decision_cost.seconds)) == (0.2, False, True)


def test_uncounted_prompt_tokens_are_estimated_from_the_text():
    event = parse_event({**RETRIEVED, "tokens": {"draft": 4, "answer": 6}})
    assert event.decision_cost.prompt == math.ceil(len("who wrote it?") / 4)
    assert event.cost_if_retrieved.prompt == event.decision_cost.prompt + math.ceil(len(" Bob wrote it.") / 4)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("Paris", "It is Paris.", True), ("It is Paris.", "paris", True), ("Rome", "Paris", False), ("", "", False)],
)
def test_answers_agree_if_one_contains_the_other(one, other, same):
    assert answers_agree(one, other) is same


# --- logs -----------------------------------------------------------------------------------------


def test_bad_lines_are_counted_with_the_first_of_their_kind(tmp_path):
    bad = [
        "oops",
        "[1]",
        {**SKIPPED, "need": 2},
        {**SKIPPED, "need": True},
        {**SKIPPED, "retrieve": None},
        {**SKIPPED, "seconds": {"total": "long"}},
        {**SKIPPED, "passages": ["x"]},
        {**SKIPPED, "answer": 3},
        '{"need": NaN, "retrieve": true}',
    ]
    log = read_traffic_log(write_log(tmp_path / "log.jsonl", SKIPPED, *bad, "", RETRIEVED))
    assert len(log.events) == 2
    assert log.bad_lines == {
        "the line is not JSON": [2, 10],
        "the line is not a JSON object": [3],
        "the field 'need' is not a number from 0 to 1": [4, 5],
        "the field 'retrieve' is neither true nor false": [6],
        "the field 'seconds' must be a JSON object whose values are numbers of at least 0": [7],
        "the field 'passages' is not a list of JSON objects": [8],
        "the field 'answer' is not a text": [9],
    }


def test_invalid_bytes_are_a_bad_line(tmp_path):
    file = write_log(tmp_path / "log.jsonl", SKIPPED)
    file.write_bytes(file.read_bytes() + b"\xff\xfe\x00\n")
    assert list(read_traffic_log(file).bad_lines) == ["the line is not JSON"]


def test_a_compressed_log_is_read(tmp_path):
    with gzip.open(tmp_path / "log.jsonl.gz", "wt") as file:
        file.write(json.dumps(SKIPPED) + "\n")
    assert len(read_traffic_log(tmp_path / "log.jsonl.gz").events) == 1


@pytest.mark.parametrize(("lines", "reason"), [([], "the file is empty"), (["x"], "none of its lines can be used")])
def test_a_log_without_traffic_is_rejected(tmp_path, lines, reason):
    with pytest.raises(BadInput, match=reason):
        read_traffic_log(write_log(tmp_path / "log.jsonl", *lines))


@pytest.mark.parametrize("key", ["gate", "model"])
def test_a_log_of_several_gates_or_models_is_rejected(tmp_path, key):
    with pytest.raises(BadInput, match=f"several {key}s"):
        read_traffic_log(write_log(tmp_path / "log.jsonl", SKIPPED, {**RETRIEVED, key: "other"}))


def test_the_threshold_of_the_log_is_recorded(tmp_path):
    assert read_traffic_log(write_log(tmp_path / "log.jsonl", SKIPPED, RETRIEVED)).thresholds == {0.5: 2}


# --- label runs -----------------------------------------------------------------------------------


def test_a_label_run_has_graded_risk(tmp_path):
    rows = [graded_row("a", 0.2, True, True), graded_row("b", 0.3, False, True), graded_row("c", 0.8, False, True)]
    log = read_label_run_traffic(write_rows(tmp_path / "run", rows), str(write_gate(tmp_path / "gate")))
    line = replay_traffic(Traffic(log.events), [0.5], Prices())[0]
    assert (line.retrieved, line.known, line.risk.value) == (1, 2, 1 / 3)
    assert line.savings["seconds"] is None
    assert line.savings["tokens"].saved > 0
    assert log.run_threshold == 0.5


def test_questions_the_gate_was_fitted_on_are_left_out(tmp_path):
    run = write_rows(tmp_path / "run", [graded_row("a", 0.2, True, True), graded_row("b", 0.3, False, True)])
    log = read_label_run_traffic(run, str(write_gate(tmp_path / "gate", seen=["question a?"])))
    assert (len(log.events), log.left_out) == (1, {"fitted on": 1})
    with pytest.raises(BadInput, match="trained on every question"):
        read_label_run_traffic(run, str(write_gate(tmp_path / "all", seen=["question a?", "question b?"])))


def test_a_label_run_without_open_book_answers_has_no_risk(tmp_path):
    run = write_rows(tmp_path / "run", [graded_row("a", 0.2, True, None, passages=())])
    log = read_label_run_traffic(run, str(write_gate(tmp_path / "gate")))
    assert log.events[0].loses_answer is None
    assert replay_traffic(Traffic(log.events), [0.5], Prices())[0].savings["tokens"] is None
