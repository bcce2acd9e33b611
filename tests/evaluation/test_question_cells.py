"""Very many questions are resampled in cells: decisions exactly, ranks and calibration all but."""

import numpy as np
import pytest

from knowgate.data.runs.records import TableScores
from knowgate.data.runs.table import load_label_table
from knowgate.evaluation import gate_results
from knowgate.evaluation.gate_results import (
    NEED_LEVELS,
    GradedNeeds,
    _build_gate_metric,
    _resample_cells,
    group_into_cells,
    measure_gates,
)
from knowgate.stats.bootstrap import Bootstrap
from knowgate.stats.metrics import N_ECE_BINS, unit_weights
from tests.support.hand_gate import varied_rows, write_rows

RANKS = ("auroc", "auprc", "aurc", "auroc_benefit", "ece", "brier")


def judged(n, seed=0, digits=9):
    rng = np.random.default_rng(seed)
    needs = np.round(rng.beta(0.5, 0.7, n), digits)
    return GradedNeeds(needs, 0.4, rng.random(n) > needs, rng.random(n) < 0.6)


def test_a_cell_holds_questions_of_one_verdict_one_bin_and_neighbouring_needs():
    outcomes = judged(30_000)
    cells = group_into_cells(outcomes)
    for name in ("closed_book_right", "open_book_right", "retrieve"):
        assert (getattr(cells.cells, name)[cells.cell_of_question] == getattr(outcomes, name)).all()
    assert (
        np.floor(cells.cells.needs[cells.cell_of_question] * N_ECE_BINS) == np.floor(outcomes.needs * N_ECE_BINS)
    ).all()
    assert np.abs(cells.cells.needs[cells.cell_of_question] - outcomes.needs).max() < 0.01
    assert len(cells.cells.needs) <= 4 * (NEED_LEVELS + N_ECE_BINS + 1)


def test_cells_are_exact_for_few_distinct_needs():
    outcomes = judged(5_000, digits=2)
    cells = group_into_cells(outcomes)
    assert (cells.cells.needs[cells.cell_of_question] == outcomes.needs).all()
    plain, counted = _build_gate_metric(outcomes)(unit_weights(5_000)), cells.build_metric()(unit_weights(5_000))
    for name, value in plain.items():
        assert counted[name] == pytest.approx(value, abs=1e-12)


def test_resamples_of_cells_match_those_of_the_questions():
    n = 30_000
    gates, draws = [judged(n), judged(n, seed=1)], Bootstrap(n, resamples=60)
    exact, cells = draws.apply([_build_gate_metric(outcomes) for outcomes in gates]), _resample_cells(gates, draws)
    for outcomes, other in zip(exact, cells, strict=True):
        assert outcomes.keys() == other.keys()
        for name, values in outcomes.items():
            assert other[name][0] == values[0]  # of the questions as they are
            assert other[name] == pytest.approx(values, abs=5e-5 if name in RANKS else 2e-7)


def test_without_open_book_answers_ranks_are_still_measured():
    outcomes = judged(30_000)
    (resampled,) = _resample_cells(
        [GradedNeeds(outcomes.needs, 0.4, outcomes.closed_book_right, None)], Bootstrap(30_000, resamples=5)
    )
    assert len(resampled["auroc"]) == 6
    assert "accuracy" not in resampled


def test_without_resamples_only_the_values_remain():
    (resampled,) = _resample_cells([judged(100)], Bootstrap(100, resamples=0))
    assert {len(values) for values in resampled.values()} == {1}


def test_an_evaluation_of_many_questions_uses_cells(tmp_path, monkeypatch):
    labels = load_label_table([write_rows(tmp_path / "run", varied_rows(60))])
    gates = [TableScores("a", 0.5, np.random.default_rng(0).random(60))]
    (exact,) = measure_gates(labels, gates, Bootstrap(60, resamples=40))
    monkeypatch.setattr(gate_results, "MAX_EXACT_QUESTIONS", 10)
    (cells,) = measure_gates(labels, gates, Bootstrap(60, resamples=40))
    assert cells.measures["accuracy"] == exact.measures["accuracy"]
    assert cells.measures["auroc"].low == pytest.approx(exact.measures["auroc"].low, abs=1e-6)
