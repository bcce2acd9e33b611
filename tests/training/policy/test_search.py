"""`fit_policy`: from label rows to one folder with gate, arbiter, threshold and guarantee."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from knowgate.errors import BadInput, BadSetting, WeightsError
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.gates import load_gate
from knowgate.gates.arbiters import get_policy_arbiter, load_arbiter
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE, read_artifact
from knowgate.gates.calibration.threshold_choice import NetLoss
from knowgate.training.policy import candidates
from knowgate.training.policy.evidence import MemoryEmbedder, assign_policy_folds, load_evidence
from knowgate.training.policy.search import fit_policy
from tests.support.hand_gate import write_rows
from tests.support.pairs_by_hand import pair_row, pair_rows


@pytest.fixture(scope="module", autouse=True)
def _without_text():
    """Leave out embedding model and judges: the fake rows have log-probabilities, which are enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "DEFAULT_GATES", ())
        patch.setattr(candidates, "MAX_CPU_ROWS", 0)
        patch.setattr(MemoryEmbedder, "embed", embed_parity)
        yield


def embed_parity(self, texts):
    """Even and odd question numbers are two topics."""
    return np.eye(2, dtype=np.float32)[[int(re.sub(r"\D", "", text)) % 2 for text in texts]]


def make_rows(n, opened=lambda i: True, closed=lambda i: i % 2 == 0):
    """Rows whose closed-book answer is sure if and only if it is right."""
    return [pair_row(f"r{i}", 0.1 if closed(i) else 0.9, closed(i), opened(i)) for i in range(n)]


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("policy") / "run", make_rows(600))


@pytest.fixture(scope="module")
def policy(good_run):
    """The policy of these rows."""
    return fit_policy(good_run, out=good_run.parent / "policy")


@pytest.fixture(scope="module")
def plain(good_run):
    """The policy of these rows without topics, and what its fit said."""
    messages = []
    keep = {"topics": "none", "watch": lambda progress: messages.append(progress.words)}
    return fit_policy(good_run, out=good_run.parent / "plain", **keep), messages


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """The policy of 60 rows, and what its fit said."""
    folder, messages = tmp_path_factory.mktemp("few"), []
    run = write_rows(folder / "run", make_rows(60))
    return fit_policy(run, out=folder / "policy", watch=lambda progress: messages.append(progress.words)), messages


def test_a_gate_that_knows_is_chosen_and_saves_the_searches_it_can(policy):
    assert policy.choice.chosen.gate.startswith("logprob")
    assert policy.held_out.searches == pytest.approx(0.5, abs=0.1)
    assert policy.held_out.right >= 0.98
    manifest = policy.gate.artifact.manifest
    assert manifest["guarantee"]["epsilon"] <= 0.04
    assert "LLM calls" in (policy.path / "README.md").read_text(encoding="utf-8")


def test_the_card_shows_what_is_known_and_searched_for_by_topic(policy, plain):
    assert "The card has" not in policy.summary[-1]
    assert "By topic, the LLM knows most (100.0 % about" in policy.summary[-1]
    assert "and least (0.0 % about" in policy.summary[-1]
    card = (policy.path / "README.md").read_text(encoding="utf-8")
    section = card.partition("## By topic")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "| 300 |" in line]
    assert sorted((cells[2].partition(" [")[0], cells[-1]) for cells in rows) == [
        ("0.0 %", "100.0 %"),
        ("100.0 %", "0.0 %"),
    ]
    assert "## By topic" not in (plain[0].path / "README.md").read_text(encoding="utf-8")


def test_the_card_shows_right_answers_by_share_of_searches(policy):
    frontier = policy.choice.frontier
    assert 3 <= len(frontier) <= 8
    assert [item.searches for item in frontier] == sorted(item.searches for item in frontier)
    assert all(item.right == pytest.approx(min(1.0, 0.5 + item.searches), abs=0.03) for item in frontier)
    card = (policy.path / "README.md").read_text(encoding="utf-8")
    assert "- question, logprob: " in card  # the legend explains the names in the table, and no others
    assert "- fusion: " not in card
    assert f"| {frontier[0].searches:.0%} | {frontier[0].right:.1%} [" in card


def test_the_rows_that_prove_the_guarantee_are_not_those_it_was_fitted_on(policy):
    seen = set((policy.path / "seen.txt").read_text(encoding="utf-8").split())
    tested = set((policy.path / "calibrated.txt").read_text(encoding="utf-8").split())
    assert tested
    assert not seen & tested
    assert len(tested) == policy.gate.artifact.manifest["guarantee"]["n"]


def test_never_retrieving_is_written_if_retrieval_changes_nothing(tmp_path):
    run = write_rows(tmp_path / "run", make_rows(600, opened=lambda i: i % 2 == 0))
    policy = fit_policy(run, out=tmp_path / "policy")
    assert policy.choice.chosen.name == "never"
    assert "Retrieval hardly pays here" in " ".join(policy.summary)
    assert policy.gate.threshold == 1.0
    assert policy.gate.artifact.manifest["gate"] == "constant"


def test_the_first_message_says_how_to_try_a_judge_where_none_is_tried(plain):
    _, messages = plain
    assert "No judge is fine-tuned here unless you name one: base='small'" in messages[0]


def test_few_rows_give_the_policy_to_always_retrieve_and_say_how_many_would_do(few):
    policy, messages = few
    assert policy.gate.threshold == ALWAYS_RETRIEVE
    pattern = r"You gave 60 graded questions, (\d+) of them to choose on\. At least (\d+) questions to choose on"
    n_fit, required = map(int, re.search(pattern, " ".join(policy.summary)).groups())
    assert n_fit < 60
    assert NetLoss(0, 0, required).upper() <= 0.03 < NetLoss(0, 0, required - 1).upper()
    assert re.search(pattern + ".* even if it loses no answer", messages[1])  # before any gate is tried


def test_a_policy_that_fails_on_the_test_questions_is_rejected_and_shown_with_the_limit_that_failed(tmp_path):
    names = [f"question r{i}?" for i in range(600)]
    is_held_out = assign_policy_folds(names, seed=0) < 0  # here the LLM is sure of its wrong answers
    rows = [pair_row(f"r{i}", 0.1 if (i % 2 == 0) != is_held_out[i] else 0.9, i % 2 == 0, True) for i in range(600)]
    policy = fit_policy(write_rows(tmp_path / "run", rows), out=tmp_path / "policy")
    assert policy.choice.chosen.name == "always"
    rejected = policy.choice.rejected
    assert rejected.name.startswith("logprob")
    assert rejected.result.loss.n == 600
    assert rejected.result.searches == pytest.approx(0.5, abs=0.05)
    assert "points less; at most 1 is allowed" in rejected.failure
    card = (policy.path / "README.md").read_text(encoding="utf-8")
    assert f"| rejected: {rejected.name}, cross-validated | {rejected.result.searches:.1%} |" in card
    assert (
        "No policy passed all checks. The row 'rejected' shows the results of the best-looking policy"
        in policy.summary[1]
    )
    assert rejected.failure in card


def test_retrieving_always_with_the_rules_is_written_as_one_policy_that_makes_drafts(tmp_path):
    """Without a useful gate, the rules still give the closed-book answer where the other one abstains."""
    rows = [
        pair_row(f"r{i}", 0.5, i % 5 == 0, i % 5 != 0, texts=(f"Paris {i}", "Not mentioned." if i % 5 == 0 else "Rome"))
        for i in range(600)
    ]
    rows = [replace(row, closed=replace(row.closed, tokens=None)) for row in rows]  # nothing for a gate to read
    policy = fit_policy(write_rows(tmp_path / "run", rows), out=tmp_path / "policy")
    assert policy.choice.chosen.name == "always + rules"
    assert policy.held_out.right == 1.0
    assert "the arbiter is worth its LLM calls" in policy.summary[0]
    assert "20.0 points more right answers than always retrieving (estimate)" in policy.summary[2]
    assert "saves 0.0% of the searches but makes 2.00 LLM calls per question instead of 1.00" in policy.summary[1]
    worth = "It pays only if a right answer is worth more than 0.025, in the currency of your prices."  # 0.005 / 0.2
    assert f"{worth} To save costs instead, set `price_wrong` below that." in policy.summary[1]
    cheaper = fit_policy(tmp_path / "run", out=tmp_path / "cheaper", price_wrong=0.024)
    assert cheaper.choice.chosen.name == "always"
    assert (
        cheaper.summary[1]
        == "No policy that was tried is both safe and clearly worth more than always on these questions."
    )
    assert get_policy_arbiter(str(policy.path)) == "rules:make_drafts=true"
    assert policy.gate.threshold == ALWAYS_RETRIEVE


def test_the_card_of_a_constant_gate_claims_no_probability_and_no_unexplained_bound(few):
    policy, _ = few
    card = (policy.path / "README.md").read_text(encoding="utf-8")
    assert "It decides the same for every question" in card
    assert "nothing is lost against always retrieving" in card
    for phrase in ("calibrated probability", "AUROC", "No threshold is proven", "-0.0", "| chosen on |"):
        assert phrase not in card


def test_terminal_and_card_say_the_same_about_the_limits(policy):
    card = (policy.path / "README.md").read_text(encoding="utf-8")
    assert all(line in card for line in policy.summary)
    assert "On all 600 questions" in policy.summary[1]
    epsilon = policy.gate.artifact.manifest["guarantee"]["epsilon"]
    assert f"Guarantee: the policy loses at most {100 * epsilon:.1f} points" in policy.summary[3]
    assert "| test questions |" in card


def test_an_arbiter_that_helps_is_inside_the_folder_and_used_with_the_gate(tmp_path):
    run = write_rows(tmp_path / "run", pair_rows(800))
    policy = fit_policy(run, out=tmp_path / "policy")
    assert policy.choice.chosen.arbiter == "features"
    assert get_policy_arbiter(str(tmp_path / "policy")) == str(tmp_path / "policy" / "arbiter")
    assert load_arbiter(str(tmp_path / "policy" / "arbiter")).name == "features"
    assert read_artifact(tmp_path / "policy").manifest["guarantee"]["arbiter"]["name"] == "features"
    test = write_rows(tmp_path / "test", pair_rows(200, seed=1))
    evaluation = evaluate(str(tmp_path / "policy"), test, resamples=0)
    assert evaluation.cascade.fingerprint == policy.gate.artifact.manifest["guarantee"]["arbiter"]["fingerprint"]
    assert {line.gate for line in evaluation.cascade.results} >= {"always", "policy"}


def test_without_open_book_answers_the_threshold_is_not_calibrated(tmp_path):
    rows = [pair_row(f"r{i}", 0.1 if i % 2 else 0.9, bool(i % 2), True) for i in range(200)]
    run = write_rows(tmp_path / "run", [replace(row, open=None, benefit=None) for row in rows])
    policy = fit_policy(run, out=tmp_path / "policy")
    assert policy.choice is None
    assert policy.gate.artifact.manifest["calibrated"] is False
    assert "not calibrated" in " ".join(policy.summary)


def test_an_interrupted_fit_keeps_its_finished_predictions(good_run, tmp_path, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("knowgate.training.policy.search.choose_policy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fit_policy(good_run, out=tmp_path / "policy")
    stored = list(tmp_path.glob(".*/needs-*.json")) + list(tmp_path.glob("*/needs-*.json"))
    assert len(stored) == 2
    assert not (tmp_path / "policy" / "gate.json").exists()
    values = json.loads(stored[0].read_text(encoding="utf-8"))
    assert all(0 <= value <= 1 for value in values)


def test_equal_questions_share_a_fold_and_a_quarter_is_held_out():
    folds = assign_policy_folds([f"question {i // 2}" for i in range(2000)], seed=0)
    assert (folds[::2] == folds[1::2]).all()
    assert (folds < 0).mean() == pytest.approx(0.25, abs=0.03)
    assert set(folds.tolist()) == {-1, 0, 1, 2, 3}


def test_too_few_rows_and_no_runs_are_refused(tmp_path):
    with pytest.raises(BadSetting, match="needs recorded answers"):
        fit_policy([], out=tmp_path / "policy")
    with pytest.raises(BadInput, match="needs 40 graded questions"):
        fit_policy(write_rows(tmp_path / "run", make_rows(20)), out=tmp_path / "policy")


def test_the_evidence_says_what_the_rows_hold(good_run):
    assert "answers with and without passages, log-probabilities" in load_evidence([good_run]).describe()


def test_a_policy_loads_as_a_gate(policy):
    assert load_gate(str(policy.path)).name == "fusion"


def test_a_gate_whose_weights_cannot_be_downloaded_is_left_out_and_named(good_run, tmp_path):
    tried, messages = [], []
    fitter = candidates.CandidateFitter(load_evidence([good_run]), None, tmp_path, messages.append)
    for name in ("fusion (known)", "logprob:min"):
        with fitter.report_failure(name):
            if name == "fusion (known)":
                raise WeightsError("the weights 'minilm' cannot be downloaded.")
            tried.append(name)
    assert tried == ["logprob:min"]
    assert "fusion (known) was left out" in messages[0].words
