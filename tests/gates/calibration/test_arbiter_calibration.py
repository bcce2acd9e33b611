"""Calibrating a cascade: the arbiter is asked once, its fingerprint is bound, and the promise says where it holds."""

import pytest

from knowgate.data.runs.records import read_beliefs
from knowgate.data.runs.table import load_label_table
from knowgate.errors import BadSetting
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.gates import load_gate
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.calibration.deployment import Deployment, describe_guarantee, find_violated_conditions
from knowgate.gates.calibration.threshold_calibration import calibrate
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.training.arbiter import fit_arbiter
from tests.support.hand_gate import MODEL, write_gate
from tests.support.pairs_by_hand import Prefers, pair_run

HERE = {"retriever": "index-1", "k": 3, "max_tokens": 8}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cascade")
    fit_arbiter(pair_run(folder / "train", 300, seed=1), out=folder / "arbiter")
    pair_run(folder / "run", 900, seed=2)
    return folder


@pytest.fixture
def gate(tmp_path):
    return str(write_gate(tmp_path / "gate"))


def test_the_threshold_is_for_gate_and_arbiter_together(gate, place):
    alone = calibrate(gate, place / "run", best_accuracy=True)
    both = calibrate(gate, place / "run", best_accuracy=True, arbiter=place / "arbiter")
    assert both.chosen.right > alone.chosen.right
    assert both.threshold < alone.threshold  # after retrieval little is left to lose
    assert both.held_out.right_chosen > both.held_out.right_always


def test_the_arbiter_is_bound_by_its_fingerprint(gate, place):
    found = calibrate(gate, place / "run", max_loss=0.1, confidence=0.9, net=True, arbiter=place / "arbiter")
    own = next(one for one in read_beliefs(place / "run") if one.arbiter == "arbiter").fingerprint
    assert found.evidence["arbiter"] == {"name": "arbiter", "fingerprint": own}
    assert (found.evidence["form"], found.evidence["proven"]) == ("net", True)
    used = load_gate(gate)
    assert find_violated_conditions(used, Deployment(**HERE, arbiter=own)) == []
    assert (
        "with the arbiter arbiter loses at most 10 % of the answers, net of those gained, against"
        in describe_guarantee(used, Deployment(**HERE, arbiter=own))
    )
    assert find_violated_conditions(used, Deployment(**HERE)) == ["it was proven with the arbiter 'arbiter'"]


def test_an_evaluation_shows_the_guarantee_with_its_arbiter(gate, place):
    calibrate(gate, place / "run", max_loss=0.1, confidence=0.9, net=True, arbiter=place / "arbiter")
    both = evaluate(gate, place / "run", drop_seen=True, resamples=0, arbiter=place / "arbiter").guarantees["gate"]
    assert both.text.startswith("Threshold ")
    assert "with the arbiter arbiter loses at most 10 % of the answers, net of those gained" in both.text
    assert "does not hold" not in both.text
    assert both.holds
    assert both.has_arbiter
    alone = evaluate(gate, place / "run", drop_seen=True, resamples=0).guarantees["gate"]
    assert "This does not hold here: it was proven with the arbiter 'arbiter'" in alone.text
    assert not alone.holds  # of the gate alone nothing is proven


def test_the_card_names_the_arbiter(gate, place):
    calibrate(gate, place / "run", retrieval_rate=0.5, arbiter=place / "arbiter")
    card = (load_gate(gate).artifact.path / "README.md").read_text()
    assert "with the arbiter arbiter (" in card


def test_a_guarantee_without_arbiter_disables_the_rules_arbiter(gate, place):
    rag = AdaptiveRAG(MODEL, load_gate(gate))
    assert rag.bound_arbiter is RULES_ARBITER
    calibrate(gate, place / "run", max_loss=0.2, confidence=0.9)
    assert AdaptiveRAG(MODEL, load_gate(gate)).bound_arbiter is None
    assert find_violated_conditions(load_gate(gate), Deployment(**HERE, arbiter="other")) == [
        "it was proven without an arbiter"
    ]


def test_net_counts_what_is_gained_and_skips_more(gate, place):
    harm, net = (
        calibrate(gate, place / "run", max_loss=0.15, confidence=0.9, net=net, arbiter=place / "arbiter")
        for net in (False, True)
    )
    assert net.held_out.rate < harm.held_out.rate


def test_an_arbiter_object_is_accepted(gate, place):
    found = calibrate(gate, place / "run", retrieval_rate=0.5, arbiter=Prefers("memory"))
    assert found.evidence["arbiter"]["fingerprint"] == "prefers-memory"
    assert found.chosen.right == found.chosen.right_never  # it always takes the answer from memory


def test_a_too_harmful_arbiter_is_reported(gate, place):
    found = calibrate(gate, place / "run", max_loss=0.02, confidence=0.9, arbiter=Prefers("memory"))
    assert found.sentence.startswith("Always retrieving with the arbiter prefers has no guarantee (")


def test_questions_the_arbiter_was_fitted_on_are_left_out(gate, place):
    n = len(load_label_table([place / "train"]).rows)
    found = calibrate(gate, [place / "run", place / "train"], retrieval_rate=0.5, held_out=0, arbiter=place / "arbiter")
    assert 0.7 * n < found.left_out["fitted on"] < n


def test_net_needs_a_maximum_loss(gate, place):
    with pytest.raises(BadSetting, match="`net` and `confidence` have an effect only with `max_loss`"):
        calibrate(gate, place / "run", best_accuracy=True, net=True)


def test_with_gains_counted_only_tested_thresholds_are_proven(gate, place):
    calibrate(gate, place / "run", max_loss=0.1, confidence=0.9, net=True)
    used = load_gate(gate)
    stricter = round(used.threshold - 0.1, 3)
    assert find_violated_conditions(used, Deployment(**HERE, threshold=stricter)) == []
    between = find_violated_conditions(used, Deployment(**HERE, threshold=stricter + 0.0005))
    assert "was not tested" in between[0]


def test_always_retrieving_with_an_arbiter_is_guaranteed_for_one_index(gate, place):
    calibrate(gate, place / "run", max_loss=0.6, confidence=0.9, arbiter=Prefers("memory"), out=gate + "-copy")
    kept = load_gate(gate + "-copy")
    elsewhere = Deployment(retriever="index-2", k=3, max_tokens=8, arbiter="prefers-memory")
    assert any("passages of another index (bm25)" in one for one in find_violated_conditions(kept, elsewhere))
