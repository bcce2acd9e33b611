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
MAX_ERROR_CHARS = 200  # a framework's error is cut to this length in a message
NETWORK_WORDS = ("refused", "connect", "timed out", "unreachable", "resolution")


def check_framework_version(package: str, extra: str, *, majors: tuple[str, ...]) -> None:
    """Raise an error if a framework is missing or its version is not supported.

    Args:
        package: Name of the distribution.
        extra: The optional dependency group of knowgate that installs the framework: knowgate[EXTRA].
        majors: Supported major versions, such as '1', or '0.14' for packages before version 1.
    """
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise MissingExtra(f"knowgate's {package} adapter", extra) from None
    if not any(version == major or version.startswith(f"{major}.") for major in majors):
        raise BadSetting(
            f"{package} {version} is installed, but knowgate's adapter supports version {' or '.join(majors)}. "
            f"Install a supported version: pip install 'knowgate[{extra}]', or update knowgate."
        )


def require_for_script(module: str, *, extra: str) -> None:
    """Exit with an error message if the running script needs a missing framework.

    Args:
        module: Module that the script imports.
        extra: The optional dependency group of knowgate that installs it.
    """
    if find_spec(module) is None:
        # The message goes on with "needs the extra".
        sys.exit(str(MissingExtra(feature=f"this script imports {module}, which", extra=extra)))


@contextlib.contextmanager
def wrap_errors(name: str) -> Iterator[None]:
    """Convert exceptions of another framework's object to AdapterError. Errors of knowgate pass unchanged.

    Args:
        name: How the error message names the object.
    """
    try:
        yield
    except KnowgateError:
        raise
    except Exception as error:
        message = " ".join(str(error).split())[:MAX_ERROR_CHARS] or "no reason given"
        is_network = any(word in message.lower() for word in NETWORK_WORDS)
        advice = "Check its server and address." if is_network else "Try it without knowgate first."
        brief = f"{name} failed: {type(error).__name__}"
        raise AdapterError(f"{brief}: {message}. {advice}", brief=brief) from error


def check_result_list(results: Any, name: str, maximum: int | None = None) -> list[Any]:
    """Return the result of a wrapped object as a list of at most `maximum` items.

    Raises:
        AdapterError: The result is None, a text, a dict or anything else that is not a list of results.
    """
    if results is None or isinstance(results, str | bytes | dict) or not hasattr(results, "__iter__"):
        raise AdapterError(f"{name} returned {type(results).__name__} instead of a list. It must return a list.")
    return list(results)[:maximum]


def run_coroutine(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine from synchronous code and return its result. In a notebook, it runs in another thread."""
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
