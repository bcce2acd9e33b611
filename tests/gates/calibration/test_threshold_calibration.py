"""From label runs to a threshold: what is used, what is left out, what is refused."""

from dataclasses import replace

import pytest

from knowgate.errors import ArtifactError, BadInput, BadSetting
from knowgate.gates import load_gate
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE, SEEN_FILE, read_artifact
from knowgate.gates.calibration.threshold_calibration import (
    CalibrationOptions,
    calibrate,
    find_threshold,
    save_calibration,
)
from tests.support.hand_gate import graded_row, varied_rows, write_gate, write_rows

LOSS, HALF, BEST = (
    CalibrationOptions(max_loss=0.1, confidence=0.9),
    CalibrationOptions(retrieval_rate=0.5),
    CalibrationOptions(best_accuracy=True),
)


@pytest.fixture
def gate(tmp_path):
    return str(write_gate(tmp_path / "gate"))


@pytest.fixture
def run(tmp_path):
    return write_rows(tmp_path / "run", varied_rows(300))


def refused(gate, runs, options=LOSS):
    with pytest.raises((BadInput, BadSetting, ArtifactError)) as caught:
        find_threshold(gate, runs, options)
    return str(caught.value)


# --- what comes out -------------------------------------------------------------------------------


def test_a_guarantee_is_chosen_on_one_half_and_tested_on_the_other(gate, run):
    found = find_threshold(gate, [run], LOSS)
    assert found.chosen.n + found.held_out.n == 300
    assert 0.2 < found.threshold < 0.5  # R(t) = t^2 / 2, so 0.1 is lost at 0.45
    assert found.evidence["p_value"] <= 0.1
    assert found.evidence["harmed"] == found.chosen.harmed


def test_all_questions_can_be_used_to_choose(gate, run):
    found = find_threshold(gate, [run], LOSS.replace(held_out=0))
    assert (found.chosen.n, found.held_out) == (300, None)


def test_the_evidence_names_the_setup(gate, run):
    evidence = find_threshold(gate, [run], LOSS).evidence
    assert evidence["retriever"] == {"name": "bm25", "fingerprint": "index-1"}
    assert (evidence["epsilon"], evidence["delta"], evidence["k"], evidence["runs"]) == (0.1, 0.1, 3, ["run"])
    assert evidence["grader"] == "contains"
    assert evidence["max_tokens"] == 8
    assert evidence["reranker"] is None
    assert len(evidence["data_hash"]) == 16


def test_the_evidence_names_the_reranker_of_the_passages(gate, tmp_path):
    chosen = {"reranker": "aligned", "reranker_fingerprint": "r1", "candidates": 20}
    run = write_rows(tmp_path / "reranked", varied_rows(300), **chosen)
    named = {"name": "aligned", "fingerprint": "r1", "candidates": 20}
    assert find_threshold(gate, [run], LOSS).evidence["reranker"] == named


def test_runs_of_different_rerankers_have_no_common_threshold(gate, run, tmp_path):
    other = write_rows(tmp_path / "other", varied_rows(300, 1), reranker="aligned", reranker_fingerprint="r1")
    assert "differ in their reranker fingerprint" in refused(gate, [run, other])


def test_a_budget_holds_on_the_questions_it_was_chosen_on(gate, run):
    found = find_threshold(gate, [run], HALF)
    assert 0.48 <= found.chosen.rate <= 0.5
    assert found.held_out.rate == pytest.approx(0.5, abs=0.12)


def test_the_best_accuracy_is_at_least_that_of_always_retrieving(gate, run):
    found = find_threshold(gate, [run], BEST)
    assert found.chosen.right >= found.chosen.right_always


def test_a_gate_that_is_not_fitted_can_be_calibrated(run):
    assert 0 < find_threshold("logprob:first", [run], HALF).threshold < 1


def test_an_impossible_target_sets_always_retrieve(gate, tmp_path):
    rows = [graded_row(str(i), 0.01, False, True) for i in range(200)]
    found = find_threshold(gate, [write_rows(tmp_path / "hard", rows)], LOSS)
    assert (found.threshold, found.chosen.rate) == (ALWAYS_RETRIEVE, 1.0)


def test_the_threshold_is_written_and_used(gate, run):
    found = find_threshold(gate, [run], LOSS)
    save_calibration(found, gate)
    assert load_gate(gate).threshold == found.threshold
    assert read_artifact(gate).manifest["guarantee"] == found.evidence


def test_the_same_command_gives_the_same_threshold_again(gate, run):
    first = find_threshold(gate, [run], LOSS)
    save_calibration(first, gate)
    assert find_threshold(gate, [run], LOSS).evidence == first.evidence


# --- what is left out -----------------------------------------------------------------------------


def test_questions_the_gate_was_fitted_on_are_left_out(tmp_path, run):
    texts = [row.question for row in varied_rows(300)[:100]]
    found = find_threshold(str(write_gate(tmp_path / "fitted", seen=texts)), [run], LOSS)
    assert found.left_out == {"fitted on": 100}
    assert found.chosen.n + found.held_out.n == 200


def test_a_question_counts_once(gate, tmp_path, run):
    more = [replace(row, id=f"again {row.id}") for row in varied_rows(300)[:50]]
    found = find_threshold(gate, [run, write_rows(tmp_path / "more", more)], LOSS)
    assert found.left_out == {"asked twice": 50}


def test_failed_and_ungraded_rows_are_counted(gate, tmp_path):
    bad = [replace(varied_rows(1, seed=9)[0], error="timeout"), graded_row("u", 0.5, None, True)]
    found = find_threshold(gate, [write_rows(tmp_path / "mixed", [*varied_rows(300), *bad])], LOSS)
    assert found.left_out == {"failed": 1, "not graded": 1}


# --- what is refused ------------------------------------------------------------------------------


def test_too_few_rows_are_rejected_with_the_required_number(gate, tmp_path):
    run = write_rows(tmp_path / "few", varied_rows(100))
    said = refused(gate, [run], CalibrationOptions(max_loss=0.02))
    assert "needs at least 149 questions" in said
    assert "The others are held out for the test." in said


def test_too_few_rows_suggest_holding_out_none(gate, tmp_path):
    run = write_rows(tmp_path / "some", varied_rows(200))
    assert "held_out=0" in refused(gate, [run], CalibrationOptions(max_loss=0.02))


def test_too_few_unseen_rows_say_how_many_were_fitted_on(tmp_path, run):
    gate = write_gate(tmp_path / "fitted", seen=[row.question for row in varied_rows(300)[:290]])
    assert "unusable (290 fitted on" in refused(str(gate), [run])


def test_rows_without_open_book_answers_are_rejected_with_advice(gate, tmp_path):
    rows = [graded_row(str(i), 0.5, i % 2 == 0, None) for i in range(300)]
    assert "again with `index`" in refused(gate, [write_rows(tmp_path / "closed", rows)])


def test_a_run_where_retrieval_never_helps_is_rejected(gate, tmp_path):
    rows = [graded_row(str(i), 0.5, True, i % 2 == 0) for i in range(300)]
    assert "so skipping it loses nothing" in refused(gate, [write_rows(tmp_path / "useless", rows)])


def test_a_budget_can_be_set_even_if_retrieval_never_helps(gate, tmp_path):
    rows = [graded_row(str(i), (i + 1) / 302, True, True) for i in range(300)]
    assert find_threshold(gate, [write_rows(tmp_path / "useless", rows)], HALF).chosen.rate <= 0.5


def test_an_empty_run_is_rejected(gate, tmp_path):
    assert "is graded" in refused(gate, [write_rows(tmp_path / "empty", [])])


def test_a_run_named_twice_is_rejected(gate, run):
    assert "given twice" in refused(gate, [run, run])


@pytest.mark.parametrize("key", ["model_fingerprint", "prompts_fingerprint"])
def test_rows_of_another_model_or_wording_are_rejected(gate, tmp_path, key):
    run = write_rows(tmp_path / "other", varied_rows(300), **{key: "other"})
    assert "Calibrate on label runs with the gate's LLM and prompts" in refused(gate, [run])


@pytest.mark.parametrize("what", ["model", "prompts", "retriever"])
def test_mixed_runs_are_rejected(gate, tmp_path, run, what):
    other = write_rows(tmp_path / "other", varied_rows(50, seed=1), **{f"{what}_fingerprint": "other"})
    assert f"differ in their {what} fingerprint" in refused(gate, [run, other])


def test_a_gate_without_its_training_keys_is_rejected(gate, run, tmp_path):
    (tmp_path / "gate" / SEEN_FILE).unlink()
    assert "'seen.txt' is missing" in refused(gate, [run])


def test_drafts_of_another_length_are_rejected(tmp_path, run):
    gate = write_gate(tmp_path / "long", want={"draft_tokens": 32, "layers": []})
    assert "max_tokens=32" in refused(str(gate), [run])


def test_another_number_of_samples_is_rejected(tmp_path, run):
    options = {"features": ["first", "certainty"], "probes": []}
    gate = write_gate(tmp_path / "sampling", options=options, want={"draft_tokens": 1, "layers": [], "samples": 20})
    assert "samples=20" in refused(str(gate), [run])


@pytest.mark.parametrize("held_out", [-0.1, 1.0])
def test_a_held_out_share_outside_its_range_is_rejected(gate, run, held_out):
    with pytest.raises(BadSetting, match=f"held_out={held_out} is not allowed"):
        calibrate(gate, run, max_loss=0.1, held_out=held_out)


def test_a_row_without_passages_is_answered_closed_book_either_way(gate, tmp_path):
    rows = [*varied_rows(300), *(graded_row(f"none {i}", 0.01, False, None) for i in range(60))]
    found = find_threshold(gate, [write_rows(tmp_path / "some", rows)], LOSS.replace(held_out=0))
    assert found.chosen.n == 360
    assert found.threshold > 0.01  # they are no harmed skips


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"k": 5}, "different numbers of passages (*: 3; *: 5), but a threshold is valid for only one"),
        ({"max_tokens": 64}, "differ in their max tokens"),
        ({"open_prompts": "b"}, "different prompts for answers with passages"),
    ],
)
def test_runs_with_other_passages_or_lengths_are_not_mixed(gate, tmp_path, other, message):
    runs = [
        write_rows(tmp_path / "one", varied_rows(100), open_prompts="a"),
        write_rows(tmp_path / "two", varied_rows(100, seed=1), **{"open_prompts": "a", **other}),
    ]
    said = refused(gate, runs)
    assert all(part in said for part in message.split("*"))


def test_a_run_of_an_older_version_can_be_mixed_with_a_new_one(gate, tmp_path):
    old = write_rows(tmp_path / "old", varied_rows(100), k=None)
    new = write_rows(tmp_path / "new", varied_rows(100, seed=1), open_prompts="a")
    assert find_threshold(gate, [old, new], LOSS.replace(held_out=0)).chosen.n == 200
