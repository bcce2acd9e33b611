"""What a fusion says of its decisions: the signals that spoke, in words."""

import numpy as np

from knowgate.data.signals.features import describe_feature
from knowgate.gates.artifacts.networks import compute_contributions
from knowgate.gates.fusion import describe_signals


def test_features_are_described_in_plain_words():
    assert describe_feature("min", np.log(0.03)) == "its least certain word is 3 % certain"
    assert describe_feature("length", np.log1p(5)) == "the length of its draft in tokens is 5"
    assert describe_feature("probe-post-23", 0.0) == "its hidden states after the answer"


def test_the_strongest_signals_are_named_on_both_sides():
    values, weights = np.array([np.log(0.03), np.log(0.9), 0.0]), np.array([1.5, -0.8, 0.01])
    assert describe_signals(["min", "first", "unfinished"], values, weights) == (
        "its least certain word is 3 % certain (for retrieval); its first word is 90 % certain (against retrieval)"
    )


def test_contributions_add_up_to_the_logit():
    tensors = {
        "f.mean": np.array([1.0, 2.0]),
        "f.scale": np.array([2.0, 1.0]),
        "f.0.0.weight": np.array([[0.5, -1.0]]),
        "f.0.0.bias": np.array([0.25]),
    }
    parts = compute_contributions(tensors, np.array([[3.0, 1.0]]), "f.")
    assert parts.tolist() == [[0.5, 1.0]]


def test_a_network_with_a_hidden_layer_has_no_contributions():
    tensors = {"mean": np.zeros(1), "scale": np.ones(1), "0.0.weight": np.ones((2, 1)), "0.1.weight": np.ones((1, 2))}
    assert compute_contributions(tensors, np.zeros((1, 1))) is None
