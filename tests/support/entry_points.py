"""A package that is installed for one test: modules on the path, and entry points as its pyproject.toml lists them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

Points = Mapping[str, Mapping[str, str]]


def install(folder: Path, points: Points, modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """points: group -> name -> 'module:attribute'; modules: the folder the modules lie in."""
    about = folder / "outside-1.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n", encoding="utf-8")
    sections = [_section(group, names) for group, names in points.items()]
    (about / "entry_points.txt").write_text("\n".join(sections), encoding="utf-8")
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.syspath_prepend(str(folder))


def _section(group: str, names: Mapping[str, str]) -> str:
    return f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in names.items())
