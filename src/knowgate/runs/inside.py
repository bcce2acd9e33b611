"""A folder that is no label run but holds some, as that of `knowgate start` does: which ones, and what to type."""

from __future__ import annotations

import shlex
from pathlib import Path

AGREED = "agreed"  # folder of runs that were graded anew, by agreement; they stand for those beside it
DEPTH = 4  # knowgate-start/labels/KEY/agreed/RUN lies so deep below the folder that people name
MOST = 8  # runs that are named


def runs_inside(folder: Path, manifest: str) -> list[Path]:
    """Folders of label runs below this one. manifest: the file each of them has."""
    below = ["/".join([*(["*"] * depth), manifest]) for depth in range(1, DEPTH + 1)]
    found = sorted({file.parent for pattern in below for file in folder.glob(pattern)}) if folder.is_dir() else []
    return [run for run in found if run.parent / AGREED / run.name not in found]


def name_inside(folder: Path, manifest: str) -> str:
    """What to type instead of this folder; '' where it holds no run."""
    found = runs_inside(folder, manifest)
    if not found:
        return ""
    shown = [shlex.quote(str(run)) for run in found[:MOST]]
    more = f" ({len(found) - MOST} more are there)" if len(found) > MOST else ""
    labels = " ".join(f"--labels {run}" for run in shown)
    return (
        f"It holds {len(found)} label runs{more}. Name those you mean: knowgate report {' '.join(shown)} - or: "
        f"knowgate eval {labels}"
    )
