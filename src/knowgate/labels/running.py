"""Where the work is done, by a word: 'local' in this process, 'ray...' on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from knowgate.errors import BadSetting
from knowgate.labels.ray.cluster import Cluster
from knowgate.labels.ray.runner import RayRunner
from knowgate.labels.ray.worker import Recipe
from knowgate.types import Question, Result, Runner

LOCAL = "local"


def is_far(runner: str | Runner | None) -> bool:
    """Whether work is sent away by name; a wrong word is refused here, before anything is loaded."""
    if not isinstance(runner, str) or runner == LOCAL:
        return False
    Cluster.from_spec(runner)
    return True


def far_runner(
    spec: str,
    recipe: Recipe[Result],
    failed: Callable[[Question, str], Result],
    expected: Mapping[str, str],
) -> RayRunner[Result]:
    """The runner that sends this recipe away. failed: what becomes of a question that nobody could do."""
    return RayRunner(Cluster.from_spec(spec), recipe, failed, dict(expected))


def joined(runner: Runner | None, folder: Path) -> AbstractContextManager[Any]:
    """For a new folder: a cluster that cannot be had is noticed before the folder is there; an old one may be done."""
    return runner.joined() if isinstance(runner, RayRunner) and not folder.exists() else nullcontext()


def near_runner(runner: str | Runner | None) -> Runner | None:
    """The runner itself; None for the usual one of this process."""
    return None if isinstance(runner, str) else runner


def named(what: str, given: Any) -> str | None:
    """A thing by its name; what lives in this process cannot be sent to another machine."""
    if given is None:
        return None
    if isinstance(given, str) or hasattr(given, "__fspath__"):
        return str(given)
    raise BadSetting(
        f"with --runner ray the {what} must be given by its name, not as a {type(given).__name__}: it is made on other "
        "machines."
    )
