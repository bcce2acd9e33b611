"""Two heads: each predicts one of both answers, and the need follows their difference."""

from dataclasses import replace

import numpy as np
import pytest

from knowgate.data.runs.rows import GradedAnswer
from knowgate.errors import BadInput, BadSetting
from knowgate.gates import load_fitted_gate
from knowgate.gates.artifacts.networks import apply_network
from knowgate.stats.metrics import auroc
from knowgate.training.classifiers import LabeledFeatures
from knowgate.training.examples import load_examples
from knowgate.training.fusion import fit_calibrated_linear, fit_fusion, split_into_heads
from knowgate.training.gate import fit
from knowgate.training.gate_artifact import save_fitted
from tests.support.planted_run import LAYER, planted_rows, write_run


def write_two_answers(path, n=600):
    """Write a run in which column 0 of the state says what is known, and column 2 what passages answer."""
    rows, states = planted_rows(n)
    readable = states[f"before.{LAYER}"][:, 2] > 0
    rows = [
        replace(row, open=GradedAnswer("from a passage", correct=bool(right)), benefit=int(right) - row.closed.correct)
        for row, right in zip(rows, readable, strict=True)
    ]
    return write_run(path, rows, states)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_two_answers(tmp_path_factory.mktemp("labels") / "run")


@pytest.fixture(scope="module")
def examples(run):
    return load_examples([run], target="gain")


@pytest.fixture(scope="module")
def fusion(examples):
    return fit_fusion(examples, cheap=True)


def test_each_head_predicts_its_own_answer(examples):
    heads = split_into_heads(examples)
    assert np.array_equal(heads["closed"].needed, ~examples.table.closed_book_right.astype(bool))
    assert np.array_equal(heads["open"].needed, ~examples.table.retrieved_right.astype(bool))


def test_the_need_ranks_gains_above_ties_above_losses(fusion, examples):
    test = examples.split.test
    table, needs = examples.table, fusion.raw(test.tolist())
    gains = table.retrieved_right[test].astype(int) - table.closed_book_right[test].astype(int)
    assert auroc(gains == 1, needs) > 0.95
    assert auroc(gains >= 0, needs) > 0.95


def test_one_head_cannot_tell_a_loss_from_a_tie(examples):
    test = examples.split.test
    table = examples.table
    needs = fit_fusion(replace(examples, target="benefit"), cheap=True).raw(test.tolist())
    gains = table.retrieved_right[test].astype(int) - table.closed_book_right[test].astype(int)
    two = fit_fusion(examples, cheap=True).raw(test.tolist())
    assert auroc(gains >= 0, two) > auroc(gains >= 0, needs)


def test_the_loaded_gate_scores_like_the_fitted_one(fusion, examples, tmp_path):
    save_fitted(fusion, examples, tmp_path / "gate")
    gate = load_fitted_gate(str(tmp_path / "gate"))
    rows = examples.split.test[:20].tolist()
    questions, readings = ([part[i] for i in rows] for part in (examples.questions, examples.readings))
    assert gate.raw(questions, readings) == pytest.approx(fusion.raw(rows), abs=1e-5)
    assert gate.artifact.manifest["target"] == "gain"
    assert "from memory" in gate.explain(questions, readings)[0]


def test_a_head_is_calibrated():
    rng = np.random.default_rng(0)
    features = rng.standard_normal((2_000, 3)).astype(np.float32)
    chance = 1 / (1 + np.exp(-2 * features[:, 0]))
    needed = rng.random(2_000) < chance
    tensors = fit_calibrated_linear(LabeledFeatures(features, needed), [f"question {i}" for i in range(2_000)])
    assert np.abs(apply_network(tensors, features) - chance).mean() < 0.03


def test_an_answer_that_is_never_right_has_no_head(tmp_path):
    rows, states = planted_rows(100)
    rows = [
        replace(
            row,
            closed=replace(row.closed, correct=False),
            open=GradedAnswer("a", correct=bool(right)),
            benefit=int(right),
        )
        for row, right in zip(rows, np.arange(100) % 2 > 0, strict=True)
    ]
    examples = load_examples([write_run(tmp_path / "run", rows, states)], target="gain")
    with pytest.raises(BadInput, match="closed-book answers"):
        split_into_heads(examples)


def test_a_gate_with_one_head_rejects_the_target(run, tmp_path):
    with pytest.raises(BadSetting, match="only with the gates 'fusion' and 'gain'"):
        fit("probe", run, out=tmp_path / "gate", target="gain")
