"""Shared by all tests: the embedded model, loaded once."""

import pytest


@pytest.fixture(scope="session")
def smollm():
    """The embedded model; only for tests marked `model`."""
    from knowgate.models import load_model

    return load_model("smollm")
