"""`fit probe --balanced`: as many known as unknown questions in every split."""

import numpy as np
import pytest

from knowgate.errors import BadSetting
from knowgate.training.examples import load_examples
from knowgate.training.gate import fit
from knowgate.training.probe import BALANCED_SIZES, balance_examples, describe_balance, draw_balanced
from tests.support.planted_run import planted_row, planted_rows, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    rows, states = planted_rows(400)
    return write_run(tmp_path_factory.mktemp("even") / "run", rows, states)


def test_both_kinds_are_drawn_equally_often_and_never_more_than_asked():
    places, needed = np.arange(10, 20), np.array([False] * 10 + [True] * 7 + [False] * 3)
    assert needed[draw_balanced(places, needed, 5, 0)].tolist().count(True) == 3
    assert len(draw_balanced(places, needed, 5, 0)) == 6
    assert len(draw_balanced(places, needed, 2, 0)) == 4
    assert set(draw_balanced(places, needed, 2, 0)) <= set(places)


def test_every_split_is_even_and_what_the_run_is_too_small_for_is_said(run):
    found = balance_examples(load_examples([run]), 0)
    for name in BALANCED_SIZES:
        needed = found.needed[getattr(found.split, name)]
        assert needed.sum() * 2 == len(needed) > 0
    assert "too small for the paper's 1000 + 1000 for train" in describe_balance(found, np.zeros_like)[0]


def test_a_balanced_probe_says_how_often_its_raw_verdict_is_right(run, tmp_path):
    gate = fit("probe", run, out=tmp_path / "probe", kind="linear", balanced=True)
    assert gate.artifact.options["balanced"] is True
    assert any("raw verdict is right for 9" in note for note in gate.artifact.manifest["notes"])


def test_few_rows_get_few_updates_so_noise_is_not_learned_with_confidence(monkeypatch):
    """Random labels: 30 epochs of 125 updates on 60 rows would make the network sure of most of them."""
    from knowgate.gates.artifacts.networks import apply_network
    from knowgate.training import classifiers as networks

    monkeypatch.setattr(networks, "HIDDEN_SIZES", (64, 16))
    rng = np.random.default_rng(0)
    needed, x = rng.random(60) < 0.5, rng.standard_normal((60, 32)).astype(np.float32)
    dev = networks.LabeledFeatures(rng.standard_normal((40, 32)).astype(np.float32), rng.random(40) < 0.5)
    tensors = networks.fit_mlp(networks.LabeledFeatures(x, needed), dev, seeds=(0,), by_accuracy=True)
    assert (1 - apply_network(tensors, x)).max() < 0.95


def test_few_known_questions_are_warned_about(run, caplog):
    describe_balance(balance_examples(load_examples([run]), 0), np.zeros_like)
    assert any("with fewer than 300, the raw confidence mostly reflects" in message for message in caplog.messages)


def test_a_target_other_than_known_is_refused_with_what_to_type(tmp_path):
    from dataclasses import replace

    from knowgate.data.runs.rows import GradedAnswer

    rows = [planted_row(str(i), i % 2 == 0, 0.0) for i in range(80)]
    opened = [replace(row, open=GradedAnswer("so", correct=True), benefit=i % 2) for i, row in enumerate(rows)]
    states = planted_rows(80)[1]
    with pytest.raises(BadSetting, match="works only with target='known'"):
        fit("probe", write_run(tmp_path / "run", opened, states), out=tmp_path / "probe", balanced=True)
