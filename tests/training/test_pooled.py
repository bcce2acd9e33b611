"""Fits on several label runs: the gate says how it does on each."""

import pytest

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


def test_the_gate_says_how_it_does_on_each_set(runs, tmp_path):
    made = fit("probe", runs, out=tmp_path / "gate", kind="linear").artifact.manifest
    assert sum(one["n"] for one in made["sets"].values()) == made["split"]["test"]
    large, small = made["sets"]["large"], made["sets"]["small"]
    assert large["n"] > 3 * small["n"] > 0
    assert all(0 <= one["auroc"]["low"] <= one["auroc"]["value"] <= 1 for one in made["sets"].values())


def test_a_fit_on_one_run_has_no_sets(runs, tmp_path):
    assert "sets" not in fit("probe", runs[0], out=tmp_path / "gate", kind="linear").artifact.manifest
