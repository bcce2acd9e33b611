"""The first page, the version, `python -m knowgate`, completion, and how soon a page is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
import typer

from knowgate import __version__
from knowgate.cli.commands import COMMANDS
from knowgate.cli.main import app
from tests.cli.conftest import Call
from tests.support.params import also_slow

PLAIN = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
TIMES = 2  # what the first page may take, compared with importing typer and rich


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**PLAIN, **environment})


def test_the_first_page_has_five_panels_in_the_order_of_the_work(call: Call):
    shown = call("--help").out
    places = [shown.index(f"\n{panel}:\n") for panel in ("Ask", "Measure", "Fit", "Prove", "Tools")]
    assert places == sorted(places)


def test_every_verb_has_one_line(call: Call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = call("--help").out.splitlines()
    for name, verb in COMMANDS.items():
        assert [line for line in lines if re.match(rf"  {name} +{re.escape(verb.summary)}$", line)], name


def test_the_verbs_of_the_table_can_all_be_loaded():
    assert all(command.name == name for name, command in typer.main.get_command(app).commands.items())


def test_without_a_verb_the_first_page_is_shown(call: Call):
    assert call().out == call("--help").out


def test_the_version_is_the_packages(call: Call):
    assert call("--version").out == f"knowgate {__version__}\n"


def test_python_m_knowgate_is_the_command():
    done = python("-m", "knowgate", "--version")
    assert (done.returncode, done.stdout) == (0, f"knowgate {__version__}\n")


def test_python_m_knowgate_gives_the_exit_code():
    done = python("-m", "knowgate", "nope")
    assert (done.returncode, "Usage" in done.stdout) == (2, False)


def complete(line: str) -> list[str]:
    """What a bash shell is offered at the end of a line."""
    words = str(len(line.split(" ")) - 1)
    asked = {"_KNOWGATE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": words}
    done = python("-m", "knowgate", **asked)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        also_slow("knowgate ev", ["eval", "eval-rerank", "eval-self"]),
        also_slow("knowgate fit pr", ["probe"]),
        ("knowgate fit probe --pos", ["--position"]),
        ("knowgate fit probe --kind l", ["linear"]),
        also_slow("knowgate history st", ["stats"]),
    ],
)
def test_the_shell_completes_verbs_options_and_values(line: str, offered: list[str]):
    assert sorted(complete(line)) == offered


@pytest.mark.parametrize("shell", ["bash", also_slow("zsh"), also_slow("fish")])
def test_the_completion_script_can_be_shown(shell: str):
    done = python("-m", "knowgate", "--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert (done.returncode, "_KNOWGATE_COMPLETE" in done.stdout) == (0, True)


def test_the_help_says_how_to_get_completion(call: Call):
    assert "knowgate --install-completion" in call("--help").out


def test_the_first_page_loads_no_command_and_nothing_heavy():
    code = "import sys; from knowgate.cli.main import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    loaded = set(python("-c", code).stderr.split())
    assert not {verb.target.partition(":")[0] for verb in COMMANDS.values()} & loaded
    assert not {"numpy", "torch", "safetensors", "httpx", "knowgate.gates", "knowgate.models"} & loaded


def test_the_first_page_takes_little_more_than_what_draws_it():
    def seconds(*arguments: str) -> float:
        start = time.perf_counter()
        assert python(*arguments).returncode == 0
        return time.perf_counter() - start

    pairs = [(seconds("-m", "knowgate", "--help"), seconds("-c", "import typer, rich.console")) for _ in range(3)]
    assert min(page / libraries for page, libraries in pairs) < TIMES
