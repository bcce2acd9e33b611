"""What comes from another framework, at the door: versions, errors, and results that are none. Knows no framework."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from importlib import metadata
from importlib.util import find_spec
from typing import Any, TypeVar

from knowgate.errors import AdapterError, BadSetting, KnowgateError, MissingExtra

Result = TypeVar("Result")
MAX_ERROR_CHARS = 200  # characters of a foreign error


def check_framework_version(package: str, extra: str, *, majors: tuple[str, ...]) -> None:
    """The framework is there, in a version whose interface this was written for: '1', or '0.14' before version 1."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise MissingExtra(f"the adapter for {package}", extra) from None
    if not any(found == major or found.startswith(f"{major}.") for major in majors):
        raise BadSetting(
            f"{package} {found} is installed; knowgate's adapter was written for {' or '.join(majors)}. "
            f"Install that: pip install 'knowgate[{extra}]', or look for a newer knowgate."
        )


def require_for_script(module: str, *, extra: str) -> None:
    """For the top of a script: where the framework is not installed, it ends here with the sentence that says so."""
    if find_spec(module) is None:
        sys.exit(str(MissingExtra(f"this script imports {module}, which", extra)))


@contextlib.contextmanager
def wrap_errors(what: str) -> Iterator[None]:
    """Whatever goes wrong inside is the fault of what was wrapped, and says so."""
    try:
        yield
    except KnowgateError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:MAX_ERROR_CHARS] or "it gave no reason"
        raise AdapterError(f"{what} failed: {type(error).__name__}: {said}. {_advice(said)}") from error


def _advice(said: str) -> str:
    lost = any(word in said.lower() for word in ("refused", "connect", "timed out", "unreachable", "resolution"))
    return "Check that it runs, its address and the network." if lost else "Check it by itself first."


def check_result_list(found: Any, what: str, most: int | None = None) -> list[Any]:
    """A list of results, cut to `most`; None and anything else that is no list is an error."""
    if found is None or isinstance(found, str | bytes | dict) or not hasattr(found, "__iter__"):
        raise AdapterError(f"{what} gave {type(found).__name__}, not a list of documents. Check its return value.")
    return list(found)[:most]


def run_coroutine(work: Coroutine[Any, Any, Result]) -> Result:
    """What an async-only thing gives, from code that cannot await; a loop of its own, in a thread of its own where one
    is running already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    box: list[Any] = []

    def run() -> None:
        try:
            box.append((asyncio.run(work), None))
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            box.append((None, error))

    thread = threading.Thread(target=run, name="knowgate-await")
    thread.start()
    thread.join()
    result, error = box[0]
    if error is not None:
        raise error
    made: Result = result
    return made


def call_or_await(call: Callable[[], Result], acall: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Call a function; if it raises NotImplementedError, run its asynchronous counterpart instead."""
    try:
        return call()
    except NotImplementedError:
        return run_coroutine(acall())
