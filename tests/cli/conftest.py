"""A folder of documents, a cache of its own, and the command line called in process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from knowgate.cli.main import run
from knowgate.core.files import cache_dir


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Call = Callable[..., Outcome]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "vault.txt").write_text("The vault code is 1234.", encoding="utf-8")
    (folder / "markup.md").write_text("The [red]lamp[/red] is [/bold] on.", encoding="utf-8")
    return folder


def link_weights(cache: Path) -> None:
    """Make the weights of the usual cache available in another one, so that they are not fetched and converted again."""
    cache.mkdir()
    for name in ("weights", "converted"):
        (cache_dir() / name).mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(cache_dir() / name)


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> Call:
    if request.node.get_closest_marker("model"):
        link_weights(tmp_path / "cache")
    monkeypatch.setenv("KNOWGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return invoke
