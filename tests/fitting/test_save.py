"""From a fitted score to an artefact: calibrated, measured on held-out rows, written whole."""

import json
from dataclasses import replace

import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score

from knowgate.fitting.examples import load_examples
from knowgate.fitting.metrics import BINS, accuracy, auprc, auroc, brier, ece, measure
from knowgate.fitting.probability import ISOTONIC_OF_A_KIND, fit_calibration
from knowgate.fitting.probe import fit_probe
from knowgate.fitting.save import save_fitted
from knowgate.gates.fitted.artefact import read_artefact
from knowgate.gates.fitted.probability import to_probability
from knowgate.runs.split import seen_key
from tests.support.planted_run import MODEL, few_resamples, planted_rows, write_run

NEEDED, NEEDS = np.array([False, True, True, True]), np.array([0.1, 0.1, 0.9, 0.9])


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
    with few_resamples():
        out = tmp_path_factory.mktemp("fitted") / "probe"
        return save_fitted(replace(fitted, notes=["a note"]), examples, out, command="knowgate fit", threshold=0.3)


# --- measures -------------------------------------------------------------------------------------


def test_measures_have_the_values_worked_out_by_hand():
    assert auroc(NEEDED, NEEDS) == pytest.approx((0.5 + 1 + 1) / 3)  # pairs in order, ties for half
    assert brier(NEEDED, NEEDS) == pytest.approx((0.01 + 0.81 + 0.01 + 0.01) / 4)
    assert ece(NEEDED, NEEDS) == pytest.approx(0.5 * abs(0.5 - 0.1) + 0.5 * abs(1 - 0.9))
    assert accuracy(NEEDED, NEEDS) == pytest.approx(3 / 4)
    assert auprc(NEEDED, NEEDS) == pytest.approx(2 / 3 * 1 + 1 / 3 * 3 / 4)


def test_measures_agree_with_scikit_learn():
    rng = np.random.default_rng(0)
    needs = rng.random(500)
    needed = rng.random(500) < needs**2
    shares, means = calibration_curve(needed, needs, n_bins=BINS)
    counts = np.histogram(needs, BINS, (0, 1))[0] / 500
    assert ece(needed, needs) == pytest.approx(float(np.abs(shares - means) @ counts))
    assert auroc(needed, needs) == roc_auc_score(needed, needs)
    assert auprc(needed, needs) == average_precision_score(needed, needs)
    assert brier(needed, needs) == brier_score_loss(needed, needs)


def test_a_need_of_one_falls_into_the_last_bin():
    assert ece(np.array([True, False]), np.array([1.0, 0.0])) == 0.0


def test_what_one_kind_leaves_open_is_not_defined():
    with few_resamples():
        found = measure(np.array([True, True]), np.array([0.2, 0.9]))
    assert found["auroc"].value is None
    assert found["auroc"].shown() == "not defined"
    assert found["brier"].value == pytest.approx((0.64 + 0.01) / 2)


def test_intervals_hold_the_value_and_shrink_with_more_rows(monkeypatch):
    monkeypatch.setattr("knowgate.fitting.metrics.RESAMPLES", 40)
    rng = np.random.default_rng(0)
    needs = rng.random(2000)
    needed = rng.random(2000) < needs
    wide, narrow = measure(needed[:100], needs[:100])["brier"], measure(needed, needs)["brier"]
    assert wide.low < wide.value < wide.high
    assert narrow.low < narrow.value < narrow.high
    assert (narrow.high - narrow.low) < (wide.high - wide.low) / 2


# --- calibration ----------------------------------------------------------------------------------


def miscalibrated(n=2000):
    """Scores whose logit is a third of what it should be, and shifted: far too unsure."""
    rng = np.random.default_rng(0)
    z = rng.normal(0, 2, n)
    return 1 / (1 + np.exp(-(z / 3 - 1))), rng.random(n) < 1 / (1 + np.exp(-z))


@pytest.mark.parametrize("kind", ["platt", "isotonic"])
def test_calibration_lowers_the_error_of_a_miscalibrated_score(kind):
    raw, needed = miscalibrated()
    calibration = fit_calibration(raw[:1000], needed[:1000], kind)
    assert calibration["kind"] == kind
    before, after = ece(needed[1000:], raw[1000:]), ece(needed[1000:], to_probability(raw[1000:], calibration))
    assert before > 0.15
    assert after < 0.06


@pytest.mark.parametrize("kind", ["platt", "isotonic"])
def test_calibration_is_monotone_and_stays_within_0_and_1(kind):
    raw, needed = miscalibrated()
    grid = np.linspace(0, 1, 501)
    for truth in (needed, ~needed):  # also of a score that is the wrong way round
        needs = to_probability(grid, fit_calibration(raw, truth, kind))
        assert (np.diff(needs) >= 0).all()
        assert needs.min() >= 0
        assert needs.max() <= 1


def test_platt_finds_the_slope_and_shift_that_were_planted():
    calibration = fit_calibration(*miscalibrated(20_000), "platt")
    assert calibration["a"] == pytest.approx(3, rel=0.1)
    assert calibration["b"] == pytest.approx(3, rel=0.1)


def test_few_rows_get_platt_and_many_isotonic():
    raw, needed = miscalibrated()
    enough = np.concatenate([np.flatnonzero(needed)[:ISOTONIC_OF_A_KIND], np.flatnonzero(~needed)[:ISOTONIC_OF_A_KIND]])
    assert fit_calibration(raw[enough], needed[enough])["kind"] == "isotonic"
    assert fit_calibration(raw[enough[1:]], needed[enough[1:]])["kind"] == "platt"


def test_rows_of_one_kind_calibrate_nothing():
    raw = np.array([0.2, 0.7])
    assert to_probability(raw, fit_calibration(raw, np.array([True, True]))).tolist() == [0.2, 0.7]


# --- the artefact ---------------------------------------------------------------------------------


def test_the_folder_says_what_the_gate_is_bound_to(saved, examples):
    manifest = read_artefact(saved.path).manifest
    assert manifest["model"] == {"name": MODEL.name, "fingerprint": MODEL.fingerprint}
    assert (manifest["gate"], manifest["target"], manifest["threshold"]) == ("probe", "known", 0.3)
    assert manifest["split"] == examples.split.sizes()
    assert manifest["metrics"]["auroc"]["value"] == saved.metrics["auroc"].value > 0.95
    assert json.loads((saved.path / "gate.json").read_text()) == manifest


def test_the_folder_has_a_card_a_curve_and_the_questions_seen(saved, examples):
    assert names(saved.path) == ["README.md", "curve.svg", "gate.json", "seen.txt", "weights.safetensors"]
    text = (saved.path / "README.md").read_text()
    assert "- a note" in text
    assert f"| {saved.metrics['auroc'].value:.3f} |" in text
    seen = (saved.path / "seen.txt").read_text().split()
    assert seen == examples.seen
    assert seen_key(examples.questions[examples.split.test[0]].text) not in seen


def test_measures_are_those_of_rows_that_nothing_was_fitted_on(fitted, examples, tmp_path):
    """The truth of the test rows alone is turned round: weights and calibration stay, the AUROC is turned too."""
    turned = examples.needed.copy()
    turned[examples.split.test] ^= True
    with few_resamples():
        straight = save_fitted(fitted, examples, tmp_path / "a")
        reverse = save_fitted(fitted, replace(examples, needed=turned), tmp_path / "b")
    assert straight.manifest["calibration"] == reverse.manifest["calibration"]
    assert reverse.metrics["auroc"].value == pytest.approx(1 - straight.metrics["auroc"].value)


def test_an_empty_test_split_leaves_the_measures_undefined(fitted, examples, tmp_path):
    split = replace(examples.split, test=np.array([], dtype=np.int64))
    report = save_fitted(fitted, replace(examples, split=split), tmp_path / "gate")
    assert {found.value for found in report.metrics.values()} == {None}
    assert "not defined" in (tmp_path / "gate" / "README.md").read_text()


def test_a_save_that_fails_leaves_the_earlier_gate_and_nothing_else(fitted, examples, tmp_path):
    with few_resamples():
        save_fitted(fitted, examples, tmp_path / "gate", threshold=0.3)
        broken = replace(fitted, files={"README.md/adapter": b"a folder where the card should be"})
        with pytest.raises(OSError, match=r"README\.md"):
            save_fitted(broken, examples, tmp_path / "gate", threshold=0.9)
        assert names(tmp_path) == ["gate"]
        assert read_artefact(tmp_path / "gate").manifest["threshold"] == 0.3
        with pytest.raises(OSError, match=r"README\.md"):
            save_fitted(broken, examples, tmp_path / "new")
    assert names(tmp_path) == ["gate"]


def test_saving_again_replaces_the_earlier_gate_as_a_whole(fitted, examples, tmp_path):
    with few_resamples():
        save_fitted(replace(fitted, files={"extra.bin": b"x"}), examples, tmp_path / "gate")
        save_fitted(fitted, examples, tmp_path / "gate", threshold=0.9)
    assert "extra.bin" not in names(tmp_path / "gate")
    assert read_artefact(tmp_path / "gate").manifest["threshold"] == 0.9
