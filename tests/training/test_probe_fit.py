"""The probe learns a rule planted in the states of a label run, and says what it lacks."""

import numpy as np
import pytest

from knowgate.errors import ArtifactError, BadInput, BadSetting, UnsupportedSignal
from knowgate.gates import load_fitted_gate
from knowgate.gates.artifacts.networks import apply_network
from knowgate.stats.metrics import auroc
from knowgate.training.classifiers import (
    C_GRID,
    SEEDS,
    LabeledFeatures,
    auroc_or_half,
    fit_linear,
    fit_mlp,
    tune_linear,
)
from knowgate.training.examples import load_examples
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.probe import fit_probe, predict_out_of_fold, stratify_folds
from knowgate.types import Signal
from tests.support.planted_run import LAYER, WIDTH, planted_rows, scored_elsewhere, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("labels") / "run", *planted_rows(300))


@pytest.fixture(scope="module")
def examples(run):
    return load_examples([run])


@pytest.fixture(scope="module")
def probe(examples):
    return fit_probe(examples)


# --- learning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "position"), [("mlp", "post"), ("linear", "pre"), ("linear", "post")])
def test_it_learns_a_planted_rule(examples, kind, position):
    raw = fit_probe(examples, kind=kind, position=position).raw(examples.split.test.tolist())
    assert auroc(examples.needed[examples.split.test], raw) > 0.95
    assert raw.min() >= 0
    assert raw.max() <= 1


def test_the_papers_network_learns_it_before_the_answer_and_reads_nothing_else(probe, examples):
    assert auroc(examples.needed[examples.split.test], probe.raw(examples.split.test.tolist())) > 0.95
    assert probe.needs == {Signal.HIDDEN}
    assert (probe.request.layers, probe.request.draft_tokens, probe.request.after_draft) == ((LAYER,), 0, False)


def test_after_the_draft_it_wants_a_draft(examples):
    want = fit_probe(examples, kind="linear", position="post").request
    assert want.after_draft
    assert want.draft_tokens > 0


def test_before_and_after_are_told_apart(tmp_path):
    rows, states = planted_rows(300)
    states[f"after.{LAYER}"][:, 1] = 0.0  # the rule is only in the states before the answer
    found = load_examples([write_run(tmp_path / "run", rows, states)])
    test, truth = found.split.test.tolist(), found.needed[found.split.test]
    assert auroc(truth, fit_probe(found, kind="linear", position="pre").raw(test)) > 0.95
    assert auroc(truth, fit_probe(found, kind="linear", position="post").raw(test)) < 0.75


def test_the_network_has_the_papers_layers_once_for_each_seed(probe):
    shapes = [probe.tensors[f"2.{layer}.weight"].shape for layer in range(4)]
    assert shapes == [(512, WIDTH), (64, 512), (32, 64), (2, 32)]
    assert {name.split(".")[0] for name in probe.tensors} == {"mean", "scale", "0", "1", "2"}


def test_training_again_gives_the_same_weights_and_each_seed_its_own():
    x = np.random.default_rng(0).standard_normal((80, 3)).astype(np.float32)
    once, again = (
        fit_mlp(LabeledFeatures(x, x[:, 0] > 0), LabeledFeatures(x[:30], x[:30, 0] > 0), seeds=(0, 1)) for _ in range(2)
    )
    assert all(np.array_equal(block, again[name]) for name, block in once.items())
    assert not np.array_equal(once["0.0.weight"], once["1.0.weight"])


def test_a_seed_gives_the_same_member_whoever_trains_beside_it():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((80, 3)).astype(np.float32)
    alone = fit_mlp(LabeledFeatures(x, x[:, 0] > 0), LabeledFeatures(x[:30], x[:30, 0] > 0), seeds=(42,))
    beside = fit_mlp(LabeledFeatures(x, x[:, 0] > 0), LabeledFeatures(x[:30], x[:30, 0] > 0), seeds=SEEDS)
    assert all(np.array_equal(beside[f"1{name[1:]}"], alone[name]) for name in alone if name[0] == "0")


def test_a_rare_kind_counts_as_much_as_the_common_one():
    rng = np.random.default_rng(0)
    needed = np.arange(400) % 10 == 0  # noise says nothing of it: a weighted network is undecided
    x = rng.standard_normal((400, 3)).astype(np.float32)
    needs = apply_network(fit_mlp(LabeledFeatures(x, needed), LabeledFeatures(x[:100], needed[:100]), seeds=(0,)), x)
    assert needs.mean() == pytest.approx(0.5, abs=0.1)


def test_the_network_learns_what_no_line_can_split():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (700, 2)).astype(np.float32)
    needed = np.abs(x[:, 0]) > 0.5
    train, dev = LabeledFeatures(x[:500], needed[:500]), LabeledFeatures(x[500:600], needed[500:600])
    curved = apply_network(fit_mlp(train, dev, seeds=(0,)), x[600:])
    straight = apply_network(tune_linear(train, dev).tensors, x[600:])
    assert auroc(needed[600:], curved) > 0.9
    assert auroc(needed[600:], straight) < 0.7


def test_a_dev_split_of_one_kind_does_not_stop_training():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 3)).astype(np.float32)
    needed = x[:, 0] > 0
    needs = apply_network(
        fit_mlp(LabeledFeatures(x, needed), LabeledFeatures(x[needed][:5], needed[needed][:5]), seeds=(0,)), x
    )
    assert auroc(needed, needs) > 0.95
    assert needs[needed].mean() - needs[~needed].mean() > 0.2  # trained to the end, not for one epoch


def test_regularisation_is_chosen_by_the_dev_rows():
    rng = np.random.default_rng(0)
    x, dev = (rng.standard_normal((n, 40)).astype(np.float32) for n in (60, 300))
    needed, dev_needed = x[:, 0] > 0, dev[:, 0] > 0
    tried = [auroc(dev_needed, apply_network(fit_linear(x, needed, strength), dev)) for strength in C_GRID]
    chosen = tune_linear(LabeledFeatures(x, needed), LabeledFeatures(dev, dev_needed))
    assert chosen.strength == C_GRID[int(np.argmax(tried))]
    assert (
        tune_linear(LabeledFeatures(x, needed), LabeledFeatures(dev, ~dev_needed)).strength
        == C_GRID[int(np.argmin(tried))]
    )


def test_a_ranking_turned_round_is_not_taken_for_chance():
    assert auroc_or_half(np.array([True, False]), np.array([0.1, 0.9])) == 0.0
    assert auroc_or_half(np.array([True, True]), np.array([0.1, 0.9])) == 0.5


def test_out_of_fold_needs_come_from_probes_that_did_not_see_the_row():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((100, 90)).astype(np.float32)  # noise, as wide as long: a probe learns it by heart
    needed = rng.random(100) < 0.5
    texts = [f"question {i}" for i in range(100)]
    assert auroc(needed, apply_network(fit_linear(x, needed), x)) > 0.95
    assert auroc(needed, predict_out_of_fold(LabeledFeatures(x, needed), texts, 1.0)) < 0.7
    twice = np.tile(needed, 2)
    assert (
        auroc(twice, predict_out_of_fold(LabeledFeatures(np.tile(x, (2, 1)), twice), texts * 2, 1.0)) < 0.7
    )  # nor an equal question


def test_folds_share_out_both_kinds():
    needed = np.arange(100) % 10 == 0
    fold = stratify_folds([f"question {i}" for i in range(100)], needed)
    assert np.bincount(fold).tolist() == [20] * 5
    assert np.bincount(fold[needed]).tolist() == [2] * 5


# --- saved and loaded -----------------------------------------------------------------------------


def test_a_saved_probe_scores_the_same_in_a_new_process(probe, examples, run, tmp_path):
    manifest = save_fitted(probe, examples, tmp_path / "probe")
    gate = load_fitted_gate(str(tmp_path / "probe"))
    needs = gate.score(examples.questions, examples.readings)
    assert scored_elsewhere(tmp_path / "probe", run) == needs
    assert len(set(needs)) == len(needs)
    assert all(0 <= need <= 1 for need in needs)
    assert gate.request == probe.request
    test = examples.split.test
    assert auroc(examples.needed[test], np.array(needs)[test]) == manifest["metrics"]["auroc"]["value"]


# --- what is refused ------------------------------------------------------------------------------


def test_a_run_without_states_is_refused_with_the_label_option(tmp_path):
    found = load_examples([write_run(tmp_path / "run", planted_rows(60)[0])])
    with pytest.raises(BadSetting, match=r"no hidden states\. Label again with layers='mid,late,last'"):
        fit_probe(found)


def test_a_second_run_without_states_is_refused(run, tmp_path):
    found = load_examples([run, write_run(tmp_path / "bare", planted_rows(60, seed=1)[0])])
    with pytest.raises(UnsupportedSignal, match=f"Run `knowgate label` with layers='{LAYER}'"):
        fit_probe(found)


@pytest.mark.parametrize("part", ["train", "dev", "calibration", "test"])
def test_nan_among_the_states_is_refused_wherever_it_is(examples, tmp_path, part):
    rows, states = planted_rows(300)
    states[f"before.{LAYER}"][getattr(examples.split, part)[0], 2] = np.nan
    run = write_run(tmp_path / "run", rows, states)
    with pytest.raises(ArtifactError, match=f"hidden states 'before.{LAYER}' in .* are not a table of finite numbers"):
        load_examples([run])


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_features_whose_variance_cannot_be_computed_are_refused(value):
    features = np.array([[0.0], [1.0], [value], [1.0]], np.float32)
    with pytest.raises(BadInput, match="extremely large values"):
        fit_linear(features, np.array([True, False, True, False]))
