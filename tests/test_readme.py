"""What the README shows is what runs."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from knowgate.cli import run
from knowgate.cli.demo import demo_folder

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def docs(tmp_path, monkeypatch):
    shutil.copytree(demo_folder() / "handbook", tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "docs"


@pytest.mark.model
def test_the_library_example_runs(docs, capsys):
    code = blocks("python")[0]
    exec(compile(code, "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out


@pytest.mark.model
def test_the_ask_commands_run_on_a_folder(docs, capsys):
    lines = [line for block in blocks("console") for line in block.splitlines()]
    asking = [line for line in lines if line.startswith("knowgate ask --docs")]
    assert asking
    for line in asking:
        assert run(shlex.split(line)[1:]) == 0
        assert "Paris" in capsys.readouterr().out


def test_every_command_in_the_table_exists():
    named = set(re.findall(r"`knowgate ([\w-]+)", README))
    from typer.main import get_command

    from knowgate.cli import app

    assert named <= set(get_command(app).commands)
