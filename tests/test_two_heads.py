"""The comparison of two heads with the smaller of both ranks: its measure, worked out by hand."""

import numpy as np
import pytest

from benchmarks.two_heads import average_right, rank


def test_ranks_start_at_zero_and_ties_keep_their_order():
    assert rank(np.array([0.3, 0.1, 0.3])).tolist() == [1, 0, 2]


def test_a_question_counts_as_often_as_its_answer_is_right():
    needs = np.linspace(1, 0, 20)  # the first is retrieved first
    closed, opened = np.zeros(20, dtype=bool), np.ones(20, dtype=bool)
    right = average_right(needs, closed, opened)
    assert right[:10] == pytest.approx(1)  # retrieved at every rate from 50 % on
    assert right[10] == pytest.approx(8 / 9)  # not at 50 %
    assert right[17:].tolist() == pytest.approx([1 / 9, 0, 0])  # the 18th at 90 % only
