"""Temperature, top_k and top_p on a distribution, checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from knowgate.models.backend import apply_sampling
from knowgate.types import Sampling


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.1, 0.6, 0.3]),
        (Sampling(top_k=2), [0, 2 / 3, 1 / 3]),
        (Sampling(top_p=0.6), [0, 1, 0]),
        (Sampling(top_p=0.61), [0, 2 / 3, 1 / 3]),
        (Sampling(0.5), [0.01 / 0.46, 0.36 / 0.46, 0.09 / 0.46]),
        (Sampling(top_p=0.65, top_k=2), [0, 1, 0]),  # of what top_k left, .667 is enough
    ],
)
def test_temperature_top_k_and_top_p_are_applied_in_this_order(sampling, expected):
    np.testing.assert_allclose(apply_sampling(np.array([0.1, 0.6, 0.3]), sampling), expected)
