"""The folder of a policy is taken whole: its arbiter comes with its gate."""

import pytest

from knowgate.gates import load_gate
from knowgate.gates.arbiters import get_policy_arbiter, load_arbiter
from knowgate.gates.arbiters.abstention import RulesArbiter
from knowgate.gates.calibration.evidence import summarize_threshold
from knowgate.gates.calibration.guarantee import compute_net_p_value
from knowgate.gates.calibration.threshold_calibration import calibrate
from knowgate.gates.calibration.threshold_choice import NetLoss
from knowgate.integrations.hub import push_artifact
from knowgate.models.fake import FakeModel
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.training.policy import candidates
from knowgate.training.policy.folder import find_proven_loss, format_proof
from knowgate.training.policy.outcomes import ChoiceOptions, PolicyResult, format_change
from knowgate.training.policy.search import fit_policy
from tests.support.hand_gate import write_rows
from tests.support.pairs_by_hand import pair_rows


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "DEFAULT_GATES", ())  # without the embedding model, which is slow to load
        return fit_policy(write_rows(folder / "run", pair_rows(800)), out=folder / "policy", topics="none")


def get_arbiter_fingerprint(folder):
    return load_arbiter(get_policy_arbiter(str(folder))).fingerprint


def test_a_pipeline_uses_the_arbiter_of_the_policy_unless_another_one_is_named(policy):
    rag = AdaptiveRAG(FakeModel(), load_gate(str(policy.path), plug_in=True))
    assert rag.bound_arbiter.fingerprint == get_arbiter_fingerprint(policy.path)
    other = AdaptiveRAG(FakeModel(), load_gate(str(policy.path), plug_in=True), arbiter=RulesArbiter(make_drafts=True))
    assert other.bound_arbiter.name == "rules"


def test_a_pushed_policy_brings_its_arbiter(policy, tmp_path):
    push_artifact(policy.path, str(tmp_path / "shared"))
    assert get_policy_arbiter(str(tmp_path / "shared")) == str(tmp_path / "shared" / "arbiter")
    assert get_arbiter_fingerprint(tmp_path / "shared") == get_arbiter_fingerprint(policy.path)


def test_calibrating_a_policy_includes_its_arbiter_and_keeps_it(policy, tmp_path):
    run = write_rows(tmp_path / "run", pair_rows(400, seed=5))
    calibration = calibrate(policy.path, run, max_loss=0.2, net=True, out=tmp_path / "calibrated")
    assert calibration.evidence["arbiter"]["fingerprint"] == get_arbiter_fingerprint(policy.path)
    assert get_arbiter_fingerprint(tmp_path / "calibrated") == get_arbiter_fingerprint(policy.path)


def test_other_gates_are_not_policies():
    assert get_policy_arbiter("logprob:min") is None
    assert get_policy_arbiter(load_gate("never")) is None


def test_the_proven_loss_is_the_smallest_that_the_exact_test_accepts():
    proven = find_proven_loss(NetLoss(lost=3, gained=1, n=300), 0.05)
    assert compute_net_p_value(3, 1, 300, proven, 0.05) <= 0.05
    assert compute_net_p_value(3, 1, 300, proven - 0.001, 0.05) > 0.05


def test_changes_and_proofs_are_said_in_words():
    assert format_change(0.0123) == "1.2 points fewer right answers"
    assert format_change(-0.027) == "2.7 points more right answers"
    proof = format_proof(NetLoss(lost=0, gained=0, n=69), 0.95)
    assert proof.startswith(
        "Guarantee: the policy loses at most 6.5 points against always retrieving, with 95% confidence."
    )
    assert "on 69 test questions that" in proof
    assert format_proof(NetLoss(lost=5, gained=0, n=5), 0.95).startswith("Guarantee: nothing is proven")


@pytest.mark.parametrize(
    ("searches", "llm_calls", "gained", "warning"),
    [
        (0.9, 1.9, 2, ""),  # 0.9 more LLM calls cost less than a tenth of the searches
        (0.95, 1.95, 0, "that does not pay, because it gains no right answers"),
        (0.95, 1.95, -2, "that does not pay, because it gains no right answers"),
        (0.95, 1.95, 2, "worth more than 0.11, in the currency of your prices"),  # (0.95 * 0.005 - 0.05 * 0.05) / 0.02
    ],
)
def test_a_policy_that_costs_more_than_always_says_at_which_worth_of_an_answer_it_pays(
    searches, llm_calls, gained, warning
):
    loss = NetLoss(lost=max(-gained, 0), gained=max(gained, 0), n=100)
    result = PolicyResult("gate", "", 0.5, searches, 0.8, llm_calls, loss, loss, 0.7)
    text = result.describe_extra_cost(ChoiceOptions())
    assert warning in text
    assert bool(text) == bool(warning)


@pytest.mark.parametrize(("n", "lost"), [(5, 5), (1, 1)])
def test_if_every_answer_is_lost_nothing_is_proven(n, lost):
    assert find_proven_loss(NetLoss(lost=lost, gained=0, n=n), 0.05) == 1.0


def test_a_policy_without_proof_is_said_to_have_no_guarantee(policy):
    evidence = {**load_gate(str(policy.path), plug_in=True).artifact.manifest["guarantee"], "proven": False}
    assert "has no guarantee" in summarize_threshold(0.4, "guarantee", evidence)
    assert "with 95 % confidence" in summarize_threshold(0.4, "guarantee", {**evidence, "proven": True})
