"""Shared by all tests: the embedded model, loaded once; properties are tried without a clock."""

import pytest
from hypothesis import HealthCheck, settings

# how long an example takes tells about the machine, not about the code
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def smollm():
    """The embedded model; only for tests marked `model`."""
    from knowgate.models import load_model

    return load_model("smollm")
