"""`knowgate calibrate`: the table on stdout, words on stderr, the gate folder changed or copied."""

from __future__ import annotations

import pytest

from knowgate.gates import load_gate
from tests.support.hand_gate import varied_rows, write_gate, write_rows


@pytest.fixture
def made(tmp_path):
    write_gate(tmp_path / "gate")
    write_rows(tmp_path / "run", varied_rows(300))


def test_a_guarantee_is_written_into_the_gate(call, made):
    outcome = call("calibrate", "gate", "--labels", "run", "--max-loss", "0.1", "--confidence", "0.9")
    assert outcome.code == 0
    assert "held out" in outcome.out
    assert "loses at most 10 % of the answers against always retrieving, with 90 % confidence" in outcome.err
    assert load_gate("gate").threshold < 0.5


def test_out_leaves_the_gate_alone(call, made):
    assert call("calibrate", "gate", "--labels", "run", "--retrieval-rate", "0.2", "--out", "copy").code == 0
    assert load_gate("gate").threshold == 0.5
    assert load_gate("copy").threshold > 0.6


def test_a_plain_gate_says_how_to_pass_its_threshold(call, made):
    outcome = call("calibrate", "logprob:first", "--labels", "run", "--best-accuracy")
    assert outcome.code == 0
    assert "knowgate ask --gate logprob:first --threshold 0." in outcome.err


def test_a_cascade_says_how_it_is_used(call, made):
    options = ["--max-loss", "0.1", "--confidence", "0.9", "--net", "--arbiter", "rules"]
    outcome = call("calibrate", "gate", "--labels", "run", *options)
    assert outcome.code == 0
    assert "accuracy, always and then the arbiter" in outcome.out
    assert "net of those gained" in outcome.err
    assert "knowgate ask --gate gate --arbiter rules" in outcome.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "0 of --max-loss, --retrieval-rate and --best-accuracy are set. Set exactly one"),
        (["--max-loss", "0.1", "--best-accuracy"], "2 of --max-loss, "),
        (["--retrieval-rate", "0.5", "--confidence", "0.9"], "--confidence have an effect only with --max-loss"),
        (["--retrieval-rate", "0.5", "--net"], "--net and --confidence have an effect only with --max-loss"),
        (["--retrieval-rate", "0.5", "--arbiter", "rulez"], "rules"),
        (["--max-loss", "0"], "must be above 0 and below 1"),
        (["--max-loss", "0.1", "--confidence", "1"], "--confidence 1 is not allowed"),
        (["--retrieval-rate", "2"], "between 0 and 1"),
        (["--max-loss", "0.001"], "needs at least 2995 questions"),
    ],
)
def test_targets_that_make_no_sense_are_explained(call, made, options, message):
    outcome = call("calibrate", "gate", "--labels", "run", *options)
    assert (outcome.code, message in outcome.err) == (1, True)
    assert load_gate("gate").threshold == 0.5


def test_a_copy_of_a_plain_gate_is_refused(call, made):
    assert (
        "gate 'logprob' is not fitted"
        in call("calibrate", "logprob", "--labels", "run", "--best-accuracy", "--out", "x").err
    )


def test_an_arbiter_is_told_to_be_none_before_any_question_is_counted(call, tmp_path, made):
    (tmp_path / "my-arbiter").mkdir()
    (tmp_path / "my-arbiter" / "arbiter.json").write_text("{}", encoding="utf-8")
    outcome = call("calibrate", "my-arbiter", "--labels", "run", "--max-loss", "0.001")
    assert outcome.code == 1
    assert "'my-arbiter' contains no fitted gate" in outcome.err
    assert "Pass a folder that `knowgate fit` wrote for a gate" in outcome.err


def test_a_folder_that_is_no_run_names_the_command(call, made):
    outcome = call("calibrate", "gate", "--labels", "gate", "--best-accuracy")
    assert (outcome.code, "knowgate label" in outcome.err) == (1, True)


def test_ask_explains_the_guarantee(call, made, docs):
    call("calibrate", "gate", "--labels", "run", "--max-loss", "0.1")
    outcome = call("ask", "who?", "--model", "fake", "--gate", "gate", "--docs", docs, "--explain")
    assert outcome.code == 0
    assert "This does not hold here: it was proven for passages of another index (bm25)" in outcome.err


def test_ask_says_without_being_asked_that_a_guarantee_does_not_hold(call, made, docs):
    call("calibrate", "gate", "--labels", "run", "--max-loss", "0.1")
    outcome = call("ask", "who?", "--model", "fake", "--gate", "gate", "--docs", docs, "--k", "5", "--max-tokens", "9")
    assert "The guarantee of the gate 'fusion' does not hold here: it was proven for " in outcome.err
    assert "it was proven for 3 passages, not for 5; it was proven for answers of up to 8 tokens, not 9" in outcome.err
    assert "index-1" not in outcome.err


@pytest.mark.model
def test_ask_shows_the_guarantee_of_the_packaged_gate_only_on_demand(call, docs):
    command = ("ask", "who?", "--model", "smollm", "--docs", docs, "--max-tokens", "2")
    assert "does not hold" not in call(*command).err
    assert "This does not hold here" in call(*command, "--explain").err
