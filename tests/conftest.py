"""Shared by all tests: the embedded model, loaded once per process, and how tests are spread over processes."""

import pytest
from hypothesis import HealthCheck, settings

# A deadline per example would test the machine, not the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# The longest files start first, so that no process works alone at the end.
LONGEST_FILES = ("test_results.py", "test_ray.py", "test_docs.py", "test_judge.py", "test_llama.py")


@pytest.fixture(scope="session")
def smollm():
    """The embedded model; only for tests marked `model`."""
    from knowgate.models import load_model

    return load_model("smollm")


@pytest.fixture(scope="session")
def smollm_llamacpp():
    """The same weights, run by llama.cpp in this process; only for tests marked `model`."""
    pytest.importorskip("xllamacpp", reason="needs the extra 'llamacpp'")
    from knowgate.models import load_model

    return load_model("llamacpp:smollm")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """With `--dist loadgroup`, a file stays in one process, and all tests of the embedded model share one process."""
    if getattr(config.option, "loadgroup", False):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
        items.sort(key=_start_order)


def _group(item):
    return "model" if item.get_closest_marker("model") else str(item.path.relative_to(item.config.rootpath))


def _start_order(item):
    if item.get_closest_marker("model"):
        return 0
    return 1 if item.path.name in LONGEST_FILES else 2
