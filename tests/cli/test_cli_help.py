"""Every option and argument of every command says what it is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from knowgate.cli.main import app


def commands(command: Any, path: str = "knowgate") -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{path} {name}")


ALL = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", ALL)
def test_a_command_has_a_summary(path: str):
    assert ALL[path].help


@pytest.mark.parametrize("path", ALL)
def test_every_option_has_a_help_text(path: str):
    without = [param.name for param in ALL[path].params if not getattr(param, "help", "")]
    assert without == []
