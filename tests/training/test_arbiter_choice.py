"""`fit arbiter` with mode auto: rules first, a trained arbiter only where it is better out of fold."""

import numpy as np

from knowgate.gates.arbiters import load_arbiter
from knowgate.training.arbiter import ArbiterComparison, fit_arbiter
from tests.support.hand_gate import write_rows
from tests.support.pairs_by_hand import pair_row, pair_run


def test_a_trained_arbiter_that_is_better_out_of_fold_is_written(tmp_path):
    arbiter = fit_arbiter(pair_run(tmp_path / "run", 400), out=tmp_path / "arbiter")
    assert arbiter.artifact.manifest["arbiter"] == "features"
    assert "so it is used" in arbiter.artifact.manifest["notes"][0]


def test_the_rules_are_written_if_nothing_can_be_learned(tmp_path):
    random = np.random.default_rng(0)
    rows = [
        pair_row(f"r{i}", 0.5, bool(random.random() < 0.5), bool(random.random() < 0.8), texts=(f"a{i}", f"b{i}"))
        for i in range(300)
    ]
    for row in rows:  # log-probabilities would give the right answers away
        object.__setattr__(row.closed, "tokens", None)
        object.__setattr__(row.open, "tokens", None)
    arbiter = fit_arbiter(write_rows(tmp_path / "run", rows), out=tmp_path / "arbiter")
    assert arbiter.artifact.manifest["arbiter"] == "fitted-rules"
    assert "rules, which cost nothing, are used" in arbiter.artifact.manifest["notes"][0]
    assert load_arbiter(str(tmp_path / "arbiter")).name == "arbiter"


def test_a_gain_within_one_standard_error_is_not_enough():
    rules = np.array([True] * 50 + [False] * 50)
    trained = rules.copy()
    trained[[0, 60, 61]] = [False, True, True]
    assert not ArbiterComparison("features", rules, trained).is_trained_better
    assert ArbiterComparison("features", rules, np.ones(100, dtype=bool)).is_trained_better
