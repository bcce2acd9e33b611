"""Helpers for adapters to other frameworks: version checks, error translation, and running coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from typing import Any, TypeVar

from knowgate.errors import AdapterError, BadSetting, KnowgateError, MissingExtra

Result = TypeVar("Result")
MAX_ERROR_CHARS = 200  # of a framework's error in a message
NETWORK_WORDS = ("refused", "connect", "timed out", "unreachable", "resolution")


def check_framework_version(package: str, extra: str, *, majors: tuple[str, ...]) -> None:
    """Raise an error if a framework is not installed in a supported version.

    Args:
        package: Name of the distribution.
        extra: Extra of knowgate that installs it.
        majors: Supported versions, such as '1', or '0.14' for packages before version 1.
    """
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise MissingExtra(f"the adapter for {package}", extra) from None
    if not any(version == major or version.startswith(f"{major}.") for major in majors):
        raise BadSetting(
            f"{package} {version} is installed; knowgate's adapter supports {' or '.join(majors)}. "
            f"Install that: pip install 'knowgate[{extra}]', or look for a newer knowgate."
        )


def require_for_script(module: str, *, extra: str) -> None:
    """Exit a script with a message if a framework that it imports is not installed."""
    if find_spec(module) is None:
        sys.exit(str(MissingExtra(f"this script imports {module}, which", extra)))


@contextlib.contextmanager
def wrap_errors(name: str) -> Iterator[None]:
    """Raise every exception of a wrapped object as AdapterError that names the object."""
    try:
        yield
    except KnowgateError:
        raise
    except Exception as error:
        message = " ".join(str(error).split())[:MAX_ERROR_CHARS] or "no reason given"
        is_network = any(word in message.lower() for word in NETWORK_WORDS)
        advice = "Check that it runs, its address and the network." if is_network else "Check it by itself first."
        raise AdapterError(f"{name} failed: {type(error).__name__}: {message}. {advice}") from error


def check_result_list(results: Any, name: str, maximum: int | None = None) -> list[Any]:
    """Return results as a list of at most `maximum` items; raise AdapterError if they are not a list."""
    if results is None or isinstance(results, str | bytes | dict) or not hasattr(results, "__iter__"):
        raise AdapterError(f"{name} returned {type(results).__name__}, not a list. Check its return value.")
    return list(results)[:maximum]


def run_coroutine(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine from synchronous code, in another thread if an event loop is running in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, thread_name_prefix="knowgate-await") as pool:
        return pool.submit(asyncio.run, coroutine).result()


def call_or_await(call: Callable[[], Result], acall: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Call a function; if it raises NotImplementedError, run its asynchronous counterpart instead."""
    try:
        return call()
    except NotImplementedError:
        return run_coroutine(acall())
