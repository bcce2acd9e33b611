"""Shared by all tests: the embedded model, loaded once per process, and how tests are spread over processes."""

import functools
import gc
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A deadline per example would test the machine, not the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Files of tests that need a package of an extra, or a test package that a small environment does not have.
FILES_BY_PACKAGE = {
    "scipy": ("stats/test_frontier.py", "stats/test_logistic.py"),
    "sklearn": (
        "stats/test_metrics.py",
        "stats/test_proportions.py",
        "cli/test_cli_calibrate.py",
        "cli/test_cli_first_run.py",
        "cli/test_cli_fit_outside.py",
    ),
    "psycopg": ("core/postgres/test_migrations.py", "core/postgres/test_postgres.py", "server/test_postgres.py"),
    "opentelemetry.sdk": ("server/test_spans.py",),
    "schemathesis": ("server/test_openapi.py",),
    "torch": ("retrieval/rerankers/test_cross_encoder.py", "cli/test_cli_help.py"),
    "mapie": ("gates/calibration/test_guarantee.py",),
}


def is_installed(module: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


collect_ignore = [path for module, paths in FILES_BY_PACKAGE.items() if not is_installed(module) for path in paths]

LONGEST_FILES = (
    "test_ray_runner.py",
    "test_llama.py",
    "test_docs.py",
    "test_readme.py",
    "test_backend_contract.py",
    "test_smollm.py",
    "test_llamacpp.py",
    "test_openai_llamacpp.py",
    "test_answer_judge.py",
    "test_processes.py",
    "test_first_run.py",
    "test_lora.py",
    "test_results.py",
)


@pytest.fixture(scope="session", autouse=True)
def shared_weights(request):
    """Load the weights of the embedded model once per process, however many models and commands use them.

    Yields the function that loads weights again, for tests of the loading itself; None if no test needs the weights.
    """
    if not is_installed("torch") or not any(item.get_closest_marker("model") for item in request.session.items):
        yield None
        return
    from knowgate.core.files import cache_dir
    from knowgate.models.hf import local_model

    load_again, converted = local_model.load_transformers, (cache_dir() / "converted").resolve()
    load_once = functools.cache(load_again)

    def load(source, bits=0):
        folder = Path(source).resolve()
        is_embedded = folder.parent == converted and folder.name.startswith("SmolLM")
        return load_once(str(folder), bits) if is_embedded else load_again(source, bits)

    local_model.load_transformers = load
    yield load_again
    local_model.load_transformers = load_again


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


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep what collecting the tests imported out of later garbage collections, which take half a second with it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    """Start with the longest files, so that no process works alone at the end (`--dist loadfile` keeps this order)."""
    items.sort(key=lambda item: LONGEST_FILES.index(item.path.name) if item.path.name in LONGEST_FILES else 99)
