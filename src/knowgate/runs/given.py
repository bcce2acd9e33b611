"""Label runs as callers hand them over: opened, or by their folders, one or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from knowgate.doors import user_path
from knowgate.errors import BadSetting
from knowgate.runs.run_folder import RunFolder

Run = RunFolder | str | Path
Runs = Run | Sequence[Run]


def open_run(path: str | Path) -> RunFolder:
    """The label run in this folder; refuses a folder that is none."""
    folder = RunFolder(user_path(path))
    folder.manifest()
    return folder


def run_paths(runs: Runs) -> list[Path]:
    """The folders of these runs, in order."""
    several = list(runs) if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    wrong = [run for run in several if not isinstance(run, RunFolder | str | Path)]
    if wrong:
        raise BadSetting(f"{wrong[0]!r} is no label run: give its folder, or what `label` or `open_run` gave.")
    if not several:
        raise BadSetting("no label run is named; make one: knowgate label")
    return [run.path if isinstance(run, RunFolder) else user_path(run) for run in several]
