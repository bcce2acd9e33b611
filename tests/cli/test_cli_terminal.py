"""Commands on a real terminal of 80 columns: no line wider, colours only where they are wanted."""

from __future__ import annotations

import os
import pty
import re
import sys
from pathlib import Path

import pytest

from tests.support.extras import needs_train
from tests.support.params import also_slow
from tests.support.trials_by_hand import varied_run

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
COLUMNS = 80


def on_a_terminal(folder: Path, *arguments: str, **environment: str) -> str:
    """What a person sees, control sequences among it."""
    child, screen = pty.fork()
    if child == 0:
        os.chdir(folder)
        settings = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color", **environment}
        os.execve(sys.executable, [sys.executable, "-m", "knowgate", *arguments], settings)
    heard = b""
    while part := _read(screen):
        heard += part
    os.waitpid(child, 0)
    os.close(screen)
    return heard.decode()


def _read(screen: int) -> bytes:
    try:
        return os.read(screen, 65536)
    except OSError:  # on Linux, the end of what a terminal has to say
        return b""


def lines(heard: str) -> list[str]:
    return [line.split("\r")[-1] for line in ESCAPE.sub("", heard).replace("\r\n", "\n").split("\n")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    varied_run(tmp_path / "run")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("eval", "--labels", "run", "--resamples", "50"), marks=needs_train),
        also_slow(("report", "run")),
        ("gates",),
        also_slow(("models",)),
        also_slow(("rules",)),
    ],
    ids=lambda arguments: arguments[0],
)
def test_tables_stay_within_the_terminal(folder: Path, arguments: tuple[str, ...]):
    shown = lines(on_a_terminal(folder, *arguments, KNOWGATE_CACHE=str(folder / "cache")))
    assert len(shown) > 5
    assert [line for line in shown if len(line) > COLUMNS and str(folder) not in line] == []


def test_what_is_left_out_of_a_table_is_named(folder: Path):
    assert "(no room for: extra cost; reference)" in lines(on_a_terminal(folder, "gates"))


def test_colours_are_there_and_go_with_no_color(folder: Path):
    assert COLOUR.search(on_a_terminal(folder, "ask", "--nope", "x"))
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", on_a_terminal(folder, "ask", "--nope", "x", NO_COLOR="1"))
