"""Thirds by answer frequency: one rule, in the report and in the evaluation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knowgate.data.runs.rows import FREQUENCY_THIRDS, assign_frequency_thirds
from knowgate.data.runs.table import load_label_table
from knowgate.evaluation.boundary import measure_boundary
from knowgate.evaluation.gate_comparison import compare_gates
from knowgate.gates.offline_scoring import score_gates
from tests.support.runs_by_hand import row, side
from tests.support.trials_by_hand import trial_run

FIVE = (0, 1, 2, 5, 9)  # thirds end with the second and the fourth: 0 1 | 2 5 | 9


def test_five_counts_are_split_as_by_hand():
    assert assign_frequency_thirds(FIVE) == ["rare", "rare", "middle", "middle", "frequent"]


def test_report_and_evaluation_use_the_same_thirds(tmp_path):
    rows = [row(f"q{i}", side(i % 2 == 0), side(True), answer_frequency=count) for i, count in enumerate(FIVE)]
    reported = {one.value: one.n for one in measure_boundary(rows).slices if one.dimension == "answer frequency"}
    trial = load_label_table([trial_run(tmp_path / "run", rows)])
    found = compare_gates(trial, score_gates(trial, ["good"]), resamples=5)
    evaluated = {one.value: one.n for one in found.slices if one.dimension == "answer frequency"}
    assert reported == evaluated == {"rare": 2, "middle": 2, "frequent": 1}


def test_unknown_counts_have_no_third():
    assert assign_frequency_thirds([3, None, 1]) == ["middle", None, "rare"]


@pytest.mark.parametrize("counts", [[], [None, None], [4, 4, None]])
def test_equal_counts_have_no_thirds(counts):
    assert assign_frequency_thirds(counts) == [None] * len(counts)


@given(st.lists(st.integers(0, 6), min_size=2, max_size=40).filter(lambda counts: len(set(counts)) > 1))
def test_equal_counts_stay_together_and_rarer_ones_come_first(counts):
    order = [FREQUENCY_THIRDS.index(third) for third in assign_frequency_thirds(counts)]
    pairs = sorted(zip(counts, order, strict=True))
    assert [third for _, third in pairs] == sorted(order)
    assert len(set(pairs)) == len(set(counts))
