"""A package that is not knowgate's, as pip would have installed it: a module and its entry points."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SHORT_GATE = '''
from knowgate import Gate
from knowgate.types import Signal


class ShortGate(Gate):
    """need = 1 for answers longer than five words."""

    needs = frozenset({Signal.DRAFT})

    def score(self, questions, readings):
        return [float(len(reading.draft.text.split()) > 5) for reading in readings]


class NoGate:
    """Looks like one."""

    def score(self, questions, readings):
        return [0.0 for _ in questions]
'''


@contextlib.contextmanager
def installed(folder: Path, name: str, source: str, entry_points: str) -> Iterator[None]:
    """The module `name` can be imported, and its entry points are found."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
    sys.modules.pop(name, None)
