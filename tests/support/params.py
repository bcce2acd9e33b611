"""Parameters of tests that take long."""

import pytest


def also_slow(*values):
    """A parameter that shows at length what a cheaper one shows, too: only `make test-all` runs it."""
    return pytest.param(*values, marks=pytest.mark.slow)
