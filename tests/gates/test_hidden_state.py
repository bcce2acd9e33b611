from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from knowgate.errors import ArtifactError, UnsupportedSignal
from knowgate.gates.artifacts.gate_folder import Artifact
from knowgate.gates.hidden_state import HeadProbabilities, UarGate, apply_hard_tree, apply_head, apply_soft_tree
from knowgate.types import Question, Reading

ASK = [Question("q")]


def heads(intent, knowledge, time, own):
    return HeadProbabilities(*(np.array([value]) for value in (intent, knowledge, time, own)))


@pytest.mark.parametrize(
    ("given", "need"),
    [
        ((0.9, 0.1, 0.1, 0.1), 1.0),  # asks for sources, whatever else
        ((0.1, 0.1, 0.9, 0.9), 0.0),  # takes no knowledge
        ((0.1, 0.9, 0.9, 0.1), 1.0),  # changes with time
        ((0.1, 0.9, 0.1, 0.7), 0.7),  # else: the probability of not knowing
        ((0.1, 0.9, 0.1, 0.2), 0.2),
    ],
)
def test_the_tree_of_the_paper_takes_every_branch(given, need):
    assert apply_hard_tree(heads(*given)) == pytest.approx([need])


@pytest.mark.parametrize(
    ("given", "need"),
    [((1, 0, 0, 0), 1), ((0, 0, 1, 1), 0), ((0, 1, 1, 0), 1), ((0, 1, 0, 0.3), 0.3), ((0, 1, 0, 1), 1)],
)
def test_with_certain_heads_both_trees_agree(given, need):
    assert apply_soft_tree(heads(*given)) == pytest.approx([need])
    assert apply_hard_tree(heads(*given)) == pytest.approx([need])


def test_the_soft_tree_equals_the_value_worked_out_by_hand():
    # 0.2 + 0.8 * 0.5 * (0.1 + 0.9 * 0.4) = 0.2 + 0.4 * 0.46
    assert apply_soft_tree(heads(0.2, 0.5, 0.1, 0.4)) == pytest.approx([0.384])


def test_the_soft_tree_increases_with_every_head():
    at = [0.3, 0.6, 0.2, 0.5]
    for place in range(4):
        more = [value + 0.2 * (place == i) for i, value in enumerate(at)]
        assert apply_soft_tree(heads(*more)) > apply_soft_tree(heads(*at))


def test_a_head_is_the_product_of_weights_and_standardised_state_without_bias():
    tensors = {"time.mean": np.array([1.0, 2.0]), "time.scale": np.array([3.0, 1.0])}
    tensors["time.weight"] = np.array([1.0, -1.0])
    found = apply_head(tensors, "time", np.array([[4.0, 2.0], [1.0, 2.0]], dtype=np.float32))
    assert found == pytest.approx([1 / (1 + np.exp(-1)), 0.5])


def test_a_head_of_an_older_folder_scales_by_one_number():
    tensors = {"size": np.array([2.0]), "time.weight": np.array([1.0, -1.0])}
    found = apply_head(tensors, "time", np.array([[4.0, 2.0], [0.0, 0.0]], dtype=np.float32))
    assert found == pytest.approx([1 / (1 + np.exp(-1)), 0.5])


def gate(tree="soft"):
    """Head i looks at number i of the state."""
    names = ("intent", "knowledge", "time", "self")
    tensors = {f"{name}.weight": np.eye(4, dtype=np.float32)[i] for i, name in enumerate(names)}
    options = {"layer": 3, "tree": tree, "calibrations": [{"kind": "none"}] * 3}
    manifest = {"gate": "uar", "options": options, "needs": ["hidden"], "want": {"layers": [3]},
                "threshold": 0.5, "calibration": {"kind": "platt", "a": 1.0, "b": 0.0}}  # fmt: skip
    return UarGate(Artifact(Path("uar"), manifest, {**tensors, "size": np.array([1.0], dtype=np.float32)}))


def reading(*logits):
    return Reading(hidden={3: np.array(logits, dtype=np.float32)})


def test_the_gate_follows_its_tree():
    assert gate("hard").score(ASK, [reading(-9, 9, -9, 0)]) == pytest.approx([0.5])
    assert gate("hard").score(ASK, [reading(-9, -9, 9, 9)]) == [0.0]
    assert gate().score(ASK, [reading(-30, 30, -30, np.log(3))]) == pytest.approx([0.75], abs=1e-4)
    assert gate().score([], []) == []


def test_the_explanation_lists_every_head():
    assert gate().explain(ASK, [reading(-9, 9, -9, 0)]) == [
        "asks for sources 0.00, needs knowledge 1.00, time-sensitive 0.00, unknown 0.50"
    ]


def test_a_reading_without_the_last_layer_is_rejected():
    with pytest.raises(UnsupportedSignal, match=r"hidden states of layer 3 .* are missing"):
        gate().score(ASK, [Reading()])


def test_heads_have_their_own_scales_or_one_common_number():
    older = gate().artifact
    weights = {name: block for name, block in older.tensors.items() if name != "size"}
    heads = ("intent", "knowledge", "time", "self")
    scales = {f"{head}.{part}": np.ones(4, np.float32) for head in heads for part in ("mean", "scale")}
    assert (
        UarGate.from_artifact(older).name
        == UarGate.from_artifact(replace(older, tensors={**weights, **scales})).name
        == "uar"
    )
    with pytest.raises(ArtifactError, match=r"'self\.mean' is missing"):
        UarGate.from_artifact(replace(older, tensors=weights))
    with pytest.raises(ArtifactError, match=r"unknown tensor 'intent\.mean'"):
        UarGate.from_artifact(replace(older, tensors={**older.tensors, "intent.mean": np.ones(4, np.float32)}))
    with pytest.raises(ArtifactError, match=r"'time\.scale' contains numbers that are too large or too small"):
        UarGate.from_artifact(replace(older, tensors={**weights, **scales, "time.scale": np.zeros(4, np.float32)}))
