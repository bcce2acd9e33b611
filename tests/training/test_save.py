"""From a fitted score to an artefact: calibrated, measured on held-out rows, written whole."""

import json
from dataclasses import replace

import numpy as np
import pytest

from knowgate.data.splits import fingerprint_text
from knowgate.errors import BadInput
from knowgate.gates import load_gate
from knowgate.gates.artifacts.gate_folder import read_artifact
from knowgate.gates.artifacts.networks import apply_calibration
from knowgate.stats.metrics import unit_weights, weighted_ece
from knowgate.training.classifiers import fit_platt_scaling
from knowgate.training.examples import list_seen_keys, load_examples
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.probe import fit_probe
from knowgate.types import Sampling, SignalRequest
from tests.support.planted_run import MODEL, planted_rows, write_run


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    return load_examples([write_run(tmp_path_factory.mktemp("labels") / "run", *planted_rows(400))])


@pytest.fixture(scope="module")
def fitted(examples):
    return fit_probe(examples, kind="linear")


@pytest.fixture(scope="module")
def saved(fitted, examples, tmp_path_factory):
    out = tmp_path_factory.mktemp("fitted") / "probe"
    save_fitted(replace(fitted, notes=["a note"]), examples, out, command="knowgate fit", threshold=0.3)
    return out


def test_how_samples_are_drawn_comes_back_from_the_folder(fitted, examples, tmp_path):
    drawn = SignalRequest(
        draft_tokens=8, layers=fitted.request.layers, samples=10, sampling=Sampling(0.6, 0.9, 50), seed=0
    )
    save_fitted(replace(fitted, request=drawn), examples, tmp_path / "gate")
    assert load_gate(str(tmp_path / "gate")).request == drawn
    assert read_artifact(tmp_path / "gate").manifest["want"]["top_k"] == 50


# --- calibration ----------------------------------------------------------------------------------


def miscalibrated(n=2000):
    """Scores whose logit is a third of what it should be, and shifted: far too unsure."""
    rng = np.random.default_rng(0)
    z = rng.normal(0, 2, n)
    return 1 / (1 + np.exp(-(z / 3 - 1))), rng.random(n) < 1 / (1 + np.exp(-z))


def test_calibration_lowers_the_error_of_a_miscalibrated_score():
    raw, needed = miscalibrated()
    calibration = fit_platt_scaling(raw[:1000], needed[:1000])
    weights = unit_weights(len(raw) - 1000)
    before = weighted_ece(weights, needed[1000:], raw[1000:])[0]
    after = weighted_ece(weights, needed[1000:], apply_calibration(raw[1000:], calibration))[0]
    assert before > 0.15
    assert after < 0.06


def test_calibration_is_monotone_and_stays_within_0_and_1():
    raw, needed = miscalibrated()
    grid = np.linspace(0, 1, 501)
    for truth in (needed, ~needed):  # also of a score that is the wrong way round
        needs = apply_calibration(grid, fit_platt_scaling(raw, truth))
        assert (np.diff(needs) >= 0).all()
        assert needs.min() >= 0
        assert needs.max() <= 1


def test_platt_finds_the_slope_and_shift_that_were_planted():
    calibration = fit_platt_scaling(*miscalibrated(20_000))
    assert calibration["a"] == pytest.approx(3, rel=0.1)
    assert calibration["b"] == pytest.approx(3, rel=0.1)


def test_needs_have_as_many_distinct_values_as_scores():
    raw, needed = miscalibrated()
    sure = np.concatenate([raw, 10.0 ** -np.arange(7, 11)])  # a judge that is surer than one in a million
    needs = apply_calibration(sure, fit_platt_scaling(raw, needed))
    assert len(set(needs)) == len(set(sure))


def test_an_isotonic_map_of_an_older_gate_is_applied_as_it_was():
    old = {"kind": "isotonic", "x": [0.2, 0.4, 0.8], "y": [0.1, 0.1, 0.9]}
    assert apply_calibration(np.array([0.0, 0.3, 0.6, 1.0]), old) == pytest.approx([0.1, 0.1, 0.5, 0.9])


def test_a_platt_map_of_an_older_gate_is_applied_as_it_was():
    """Without a floor of its own, scores are told apart to 1e-6."""
    old = {"kind": "platt", "a": 1.0, "b": 0.0}
    assert apply_calibration(np.array([1e-9, 0.3]), old) == pytest.approx([1e-6, 0.3])


def test_rows_of_one_kind_calibrate_nothing():
    raw = np.array([0.2, 0.7])
    assert apply_calibration(raw, fit_platt_scaling(raw, np.array([True, True]))).tolist() == [0.2, 0.7]


# --- the artefact ---------------------------------------------------------------------------------


def test_the_folder_says_what_the_gate_is_bound_to(saved, examples):
    manifest = read_artifact(saved).manifest
    assert manifest["model"] == {"name": MODEL.name, "fingerprint": MODEL.fingerprint}
    assert (manifest["gate"], manifest["target"], manifest["threshold"]) == ("probe", "known", 0.3)
    assert manifest["split"] == examples.split.sizes()
    assert manifest["metrics"]["auroc"]["value"] > 0.95
    assert json.loads((saved / "gate.json").read_text()) == manifest


def test_questions_need_not_be_kept(fitted, examples, tmp_path):
    manifest = save_fitted(fitted, examples, tmp_path / "bare", keep_questions=False)
    assert "reference.safetensors" not in names(tmp_path / "bare")
    assert "reference" not in manifest
    assert examples.questions[0].text not in (tmp_path / "bare" / "README.md").read_text(encoding="utf-8")


def test_the_folder_has_a_card_a_curve_and_the_questions_seen(saved, examples):
    kept = ["README.md", "curve.svg", "gate.json", "reference.safetensors", "seen.txt", "weights.safetensors"]
    assert names(saved) == kept
    text = (saved / "README.md").read_text()
    assert "- a note" in text
    assert f"| {read_artifact(saved).manifest['metrics']['auroc']['value']:.3f} |" in text
    seen = (saved / "seen.txt").read_text().split()
    assert seen == list_seen_keys(examples.questions, examples.split)
    assert fingerprint_text(examples.questions[examples.split.test[0]].text) not in seen


def test_measures_are_those_of_rows_that_nothing_was_fitted_on(fitted, examples, tmp_path):
    """The truth of the test rows alone is turned round: weights and calibration stay, the AUROC is turned too."""
    turned = examples.needed.copy()
    turned[examples.split.test] ^= True
    straight = save_fitted(fitted, examples, tmp_path / "a")
    reverse = save_fitted(fitted, replace(examples, needed=turned), tmp_path / "b")
    assert straight["calibration"] == reverse["calibration"]
    value = straight["metrics"]["auroc"]["value"]
    assert reverse["metrics"]["auroc"]["value"] == pytest.approx(1 - value)


def test_an_empty_test_split_leaves_the_measures_undefined(fitted, examples, tmp_path):
    split = replace(examples.split, test=np.array([], dtype=np.int64))
    manifest = save_fitted(fitted, replace(examples, split=split), tmp_path / "gate")
    assert {found["value"] for found in manifest["metrics"].values()} == {None}
    assert "not defined" in (tmp_path / "gate" / "README.md").read_text()


def test_a_save_that_fails_leaves_the_earlier_gate_and_nothing_else(fitted, examples, tmp_path):
    save_fitted(fitted, examples, tmp_path / "gate", threshold=0.3)
    broken = replace(fitted, files={"README.md/adapter": b"a folder where the card should be"})
    with pytest.raises(BadInput, match=r"README\.md"):
        save_fitted(broken, examples, tmp_path / "gate", threshold=0.9)
    assert names(tmp_path) == ["gate"]
    assert read_artifact(tmp_path / "gate").manifest["threshold"] == 0.3
    with pytest.raises(BadInput, match=r"README\.md"):
        save_fitted(broken, examples, tmp_path / "new")
    assert names(tmp_path) == ["gate"]


def test_saving_again_replaces_the_earlier_gate_as_a_whole(fitted, examples, tmp_path):
    save_fitted(replace(fitted, files={"extra.bin": b"x"}), examples, tmp_path / "gate")
    save_fitted(fitted, examples, tmp_path / "gate", threshold=0.9)
    assert "extra.bin" not in names(tmp_path / "gate")
    assert read_artifact(tmp_path / "gate").manifest["threshold"] == 0.9
