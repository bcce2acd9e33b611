"""Shared by all tests: the embedded model, loaded once; properties tried without a clock; who runs with whom."""

import pytest
from hypothesis import HealthCheck, settings

# how long an example takes tells about the machine, not about the code
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

FIRST = ("test_results.py",)  # what takes longest begins first, so that no process waits for it at the end


@pytest.fixture(scope="session")
def smollm():
    """The embedded model; only for tests marked `model`."""
    from knowgate.models import load_model

    return load_model("smollm")


@pytest.fixture(scope="session")
def smollm_llamacpp():
    """The same weights, run by llama.cpp in-process; only for tests marked `model`."""
    pytest.importorskip("xllamacpp", reason="needs the extra 'llamacpp'")
    from knowgate.models import load_model

    return load_model("llamacpp:smollm")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """In parallel (`make test`) a file stays in one process; the tests of the embedded model share one process, too."""
    if getattr(config.option, "loadgroup", False):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
        items.sort(key=_turn)


def _group(item):
    return "model" if item.get_closest_marker("model") else f"{item.path.parent.name}-{item.path.stem}"


def _turn(item):
    return 0 if item.path.name in FIRST else 1 if item.get_closest_marker("model") else 2
