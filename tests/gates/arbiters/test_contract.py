"""What every arbiter of the tables keeps to."""

import inspect

import pytest

from knowgate.core.registry import load_target
from knowgate.gates.arbiters import ARBITERS, FITTED_ARBITERS, load_arbiter
from knowgate.gates.arbiters.fitted_arbiter import FittedArbiter
from knowgate.training.arbiter import load_arbiter_fit_function
from knowgate.training.fit_function import read_fit_options
from tests.support.pairs_by_hand import both
from tools.structure import ROOT

EXTRAS = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
ENTRIES = {**ARBITERS, **FITTED_ARBITERS}
PAIRS = [both("Paris", "Rome"), both("Lyon", "not mentioned")]


@pytest.mark.parametrize("name", ENTRIES)
def test_it_is_registered_with_a_summary(name):
    entry = ENTRIES[name]
    assert inspect.getdoc(load_target(entry.target, name, entry.extra))
    assert entry.summary
    assert not entry.extra or f"\n{entry.extra} = [" in EXTRAS


@pytest.mark.parametrize("name", ARBITERS)
def test_an_arbiter_gives_one_belief_per_pair_in_order(name):
    arbiter = load_arbiter(name)
    together = arbiter.estimate(PAIRS)
    assert together == [arbiter.estimate([pair])[0] for pair in PAIRS]
    assert all(0 <= value <= 1 for belief in together for value in (belief.closed, belief.open))
    assert arbiter.estimate([]) == []


@pytest.mark.parametrize("name", ARBITERS)
def test_loading_an_arbiter_twice_gives_the_same_fingerprint(name):
    assert load_arbiter(name).fingerprint == load_arbiter(name).fingerprint


@pytest.mark.parametrize("name", FITTED_ARBITERS)
def test_a_fitted_gate_has_a_class_and_a_fit_function_with_defaults(name):
    assert issubclass(load_target(FITTED_ARBITERS[name].target, name, "train"), FittedArbiter)
    assert all(field.description for field in read_fit_options(load_arbiter_fit_function(name)).model_fields.values())
