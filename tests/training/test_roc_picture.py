import re

import numpy as np

from knowgate.training.gate_artifact import draw_roc_curve


def gate_points(needed, needs):
    """The points of the gate's curve: fields of 260 that begin at 52, 14."""
    drawn = re.findall(r'<polyline points="([^"]*)"', draw_roc_curve(np.array(needed), np.array(needs)))[-1]
    pairs = [pair.split(",") for pair in drawn.split()]
    return [(round((float(x) - 52) / 260, 2), round(1 - (float(y) - 14) / 260, 2)) for x, y in pairs]


def test_the_curve_goes_up_for_a_needed_retrieval_and_right_for_a_needless_one():
    expected = [(0.0, 0.0), (0.0, 0.5), (0.5, 0.5), (0.5, 1.0), (1.0, 1.0)]
    assert gate_points([True, False, True, False], [0.9, 0.8, 0.7, 0.1]) == expected


def test_questions_of_one_kind_still_make_a_picture():
    assert gate_points([True, True], [0.9, 0.1]) == [(0.0, 0.0), (0.0, 0.5), (0.0, 1.0)]
