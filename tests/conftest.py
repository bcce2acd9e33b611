"""Shared by all tests: the embedded model, loaded once per process, and how tests are spread over processes."""

import ctypes
import functools
import gc
import os
import ssl
import sys
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
    "torch": ("cli/test_cli_help.py",),
    "sentence_transformers": (
        "cli/test_cli_rerank.py",
        "retrieval/rerankers/test_cross_encoder.py",
        "training/test_reranker_fit.py",
    ),
    "mapie": ("gates/calibration/test_guarantee.py",),
}


def is_installed(module: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


collect_ignore = [path for module, paths in FILES_BY_PACKAGE.items() if not is_installed(module) for path in paths]
if os.environ.get("KNOWGATE_FAST_TESTS"):  # make test-fast; tools/slow_tests.py writes the list
    collect_ignore += Path(__file__).with_name("slow_files.txt").read_text(encoding="utf-8").split()

LONGEST_FILES = (
    "test_processes.py",
    "test_ray_runner.py",
    "test_docs.py",
    "test_lora.py",
    "test_contract.py",
    "test_results.py",
    "test_policy_benchmark.py",
    "test_gain_gate.py",
    "test_postgres.py",
    "test_reranker_fit.py",
    "test_failures.py",
    "test_fusion_fit.py",
    "test_policy_judges.py",
    "test_first_run.py",
    "test_learning.py",
    "test_kbm.py",
    "test_probe_fit.py",
    "test_search.py",
    "test_answer_judge.py",
)
# Caches of hundreds of megabytes, which are emptied at the end of each file: label runs of tables, and parsed sources.
LARGE_CACHES = {
    "benchmarks.tables.common": ("load_test_run", "evaluate_data_set"),
    "tools.structure": ("tree", "nodes", "functions"),
}
MODEL_FILES = pytest.StashKey[set[Path]]()  # files with tests that are marked `model`
loaded_weights = {}  # arguments of `load_transformers` -> the embedded model as it was loaded with them
embedded_models = []  # models that use these weights


@pytest.fixture(scope="session", autouse=True)
def shared_certificates():
    """Read the certificates for HTTPS once per process. Each call such as `httpx.get` would read them again: 50 ms."""
    create_context = ssl.create_default_context
    ssl.create_default_context = functools.cache(create_context)
    yield
    ssl.create_default_context = create_context


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

    def load(source, bits=0):
        folder = Path(source).resolve()
        if folder.parent != converted or not folder.name.startswith("SmolLM"):
            return load_again(source, bits)
        if (folder, bits) not in loaded_weights:
            loaded_weights[folder, bits] = load_again(str(folder), bits)
        return loaded_weights[folder, bits]

    local_model.load_transformers = load
    yield load_again
    local_model.load_transformers = load_again


@pytest.fixture(scope="session")
def smollm():
    """The embedded model; only for tests marked `model`."""
    from knowgate.models import load_model

    embedded_models.append(load_model("smollm"))
    return embedded_models[-1]


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


def pytest_collection_modifyitems(session, items):
    """Start with the files that need the embedded model, then the longest ones (`--dist loadfile` keeps this order).

    The weights can then be released early, and no process works alone at the end.
    """
    files = session.stash[MODEL_FILES] = {item.path for item in items if item.get_closest_marker("model")}

    def rank(item):
        name = item.path.name
        return item.path not in files, LONGEST_FILES.index(name) if name in LONGEST_FILES else len(LONGEST_FILES)

    items.sort(key=rank)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """At the end of a file, release memory: large caches, and the embedded model if no test needs it any more."""
    if nextitem is None or nextitem.path == item.path:
        return
    for name in LARGE_CACHES.keys() & sys.modules.keys():
        for function in LARGE_CACHES[name]:
            getattr(sys.modules[name], function).cache_clear()
    files = item.session.stash[MODEL_FILES]
    if item.path in files and nextitem.path not in files:
        loaded_weights.clear()
        for model in embedded_models:
            vars(model).pop("loaded", None)  # it is loaded again on its next use
        gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Return three processes for two cores: a third of the time, tests wait for servers, databases and clocks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + cores // 2
