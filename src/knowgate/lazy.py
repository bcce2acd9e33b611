"""The faces of packages: names that are handed on from inside, where a module is loaded when its name is first used.

A face lists what it hands on once, in the form that type checkers and readers know:

    if TYPE_CHECKING:
        from knowgate.runs.needs import RecordedNeeds, read_needs
    else:
        __getattr__, __dir__ = hand_on(__name__)

    __all__ = ["RecordedNeeds", "read_needs"]
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any


def hand_on(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose TYPE_CHECKING block says where its names live."""
    homes: dict[str, str] = {}

    def get(name: str) -> Any:
        if not homes:
            homes.update(_homes(package))
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # so that this is not asked again
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *getattr(sys.modules[package], "__all__", ())})

    return get, listed


def _homes(package: str) -> dict[str, str]:
    """Name -> module, read from the package's own source."""
    spec = sys.modules[package].__spec__
    source = getattr(spec.loader, "get_source", lambda name: None)(package) if spec else None
    return dict(_declared(source)) if source is not None else dict(_searched(package))


def _declared(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for line in node.body:
                if isinstance(line, ast.ImportFrom):
                    yield from ((alias.name, str(line.module)) for alias in line.names)


def _searched(package: str) -> Iterator[tuple[str, str]]:
    """Where programs are shipped without their source (frozen applications): look into every module."""
    wanted = set(sys.modules[package].__all__)
    for found in pkgutil.walk_packages(sys.modules[package].__path__, f"{package}."):
        module = importlib.import_module(found.name)
        here = [name for name in wanted if getattr(vars(module).get(name), "__module__", found.name) == found.name]
        yield from ((name, found.name) for name in here if name in vars(module))
