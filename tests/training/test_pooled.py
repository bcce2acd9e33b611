"""Fits on several label runs: sets of different size can count the same, and the gate says how it does on each."""

import numpy as np
import pytest

from knowgate.errors import BadSetting
from knowgate.gates.artifacts.networks import apply_calibration, apply_network
from knowgate.training.classifiers import LabeledFeatures, fit_linear, fit_mlp, fit_platt_scaling
from knowgate.training.examples import load_examples
from knowgate.training.gate import fit
from tests.support.planted_run import LAYER, planted_rows, write_run


def swapped(n, seed):
    """The rule lies in column 2 instead of 0."""
    rows, states = planted_rows(n, seed=seed)
    order = [2, 1, 0, *range(3, states[f"before.{LAYER}"].shape[1])]
    return rows, {name: block[:, order] for name, block in states.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pooled")
    large = write_run(folder / "large", *planted_rows(400))
    return [large, write_run(folder / "small", *swapped(100, seed=7))]


def test_every_set_counts_as_much_as_any_other(runs):
    examples = load_examples(runs, balanced=True)
    totals = {name: sum(w for w, own in zip(examples.weights, examples.run_names, strict=True) if own == name)
              for name in ("large", "small")}  # fmt: skip
    assert totals == pytest.approx({"large": 250.0, "small": 250.0})
    assert examples.select_weights(np.array([0, 499])) == pytest.approx([0.625, 2.5])


def test_without_balance_all_rows_count_the_same(runs):
    examples = load_examples(runs)
    assert examples.weights is None
    assert (examples.run_names.count("large"), examples.run_names.count("small")) == (400, 100)


@pytest.mark.parametrize(
    "train", [fit_linear, lambda x, y, c, w: fit_mlp(LabeledFeatures(x, y, w), LabeledFeatures(x, y))]
)
def test_a_row_that_counts_nothing_teaches_nothing(train):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 3)).astype(np.float32)
    other = np.arange(400) % 2 == 1
    truth = np.where(other, x[:, 1] > 0, x[:, 0] > 0)
    needs = apply_network(train(x, truth, 1.0, np.where(other, 0.0, 1.0)), x)
    assert ((needs > 0.5) == (x[:, 0] > 0)).mean() > 0.9


def test_calibration_follows_the_weights():
    raw = np.tile([0.2, 0.8], 200)
    needed = np.arange(400) % 4 == 3  # half of those at 0.8, none at 0.2
    flat = apply_calibration(np.array([0.8]), fit_platt_scaling(raw, needed))
    heavier = apply_calibration(np.array([0.8]), fit_platt_scaling(raw, needed, np.where(needed, 3.0, 1.0)))
    assert flat == pytest.approx([0.5], abs=0.02)
    assert heavier == pytest.approx([0.75], abs=0.02)


def test_a_small_set_is_learned_better_when_sets_are_balanced(runs, tmp_path):
    def weight_on_its_column(**options):
        gate = fit("probe", runs, out=tmp_path / "gate", kind="linear", **options)
        weights = np.abs(gate.artifact.tensors["0.0.weight"][0])
        return weights[2] / weights[0]

    assert weight_on_its_column(balance_sets=True) > 1.5 * weight_on_its_column()


def test_the_gate_says_how_it_does_on_each_set(runs, tmp_path):
    made = fit("probe", runs, out=tmp_path / "gate", kind="linear", balance_sets=True).artifact.manifest
    assert sum(one["n"] for one in made["sets"].values()) == made["split"]["test"]
    large, small = made["sets"]["large"], made["sets"]["small"]
    assert large["n"] > 3 * small["n"] > 0
    assert all(0 <= one["auroc"]["low"] <= one["auroc"]["value"] <= 1 for one in made["sets"].values())
    card = (tmp_path / "gate" / "README.md").read_text()
    assert "By label run (each run counted the same in the fit)" in card
    assert (
        f"| large | 59 | {made['sets']['large']['base_rate']:.0%} | {made['sets']['large']['auroc']['value']:.3f}"
        in card
    )


def test_a_fit_on_one_run_has_no_sets(runs, tmp_path):
    assert "sets" not in fit("probe", runs[0], out=tmp_path / "gate", kind="linear").artifact.manifest


def test_balance_is_refused_where_it_means_nothing(runs, tmp_path):
    with pytest.raises(BadSetting, match="at least two label runs"):
        fit("probe", runs[:1], out=tmp_path / "gate", balance_sets=True)
    with pytest.raises(BadSetting, match="balance_sets=True is not supported by fit kbm"):
        fit("kbm", runs, out=tmp_path / "gate", balance_sets=True)
