"""Run folders read for the report: each with its settings and its boundary, under a name that tells it apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knowgate.evaluation.boundary.boundary import Boundary, change, measure
from knowgate.runs import LabelRow, RunFolder, check_named_once, tell_unfinished


@dataclass(frozen=True)
class RunReport:
    """A run as the report shows it. `name` is its model's where that tells the runs apart, else its folder's."""

    name: str
    path: Path
    model: str
    data: str
    grader: str
    samples: str
    temperature: str
    boundary: Boundary


def read_runs(paths: Sequence[Path]) -> list[RunReport]:
    """The runs in the order given."""
    check_named_once(paths)
    return _named([_read(path) for path in paths])


def _read(path: Path) -> RunReport:
    folder = RunFolder(path)
    manifest = folder.manifest()
    boundary = measure(folder.rows())
    tell_unfinished(path, boundary.counts.rows, manifest.get("settings", {}).get("questions"))
    graders = boundary.counts.graders
    recorded = ", ".join(name if len(graders) == 1 else f"{name} ({count})" for name, count in graders)
    return RunReport(
        name="",
        path=path,
        model=_setting(manifest, "model"),
        data=_setting(manifest, "data"),
        grader=recorded or _setting(manifest, "grade", "grader"),
        samples=_setting(manifest, "samples"),
        temperature=_drawn(manifest),
        boundary=boundary,
    )


def _drawn(manifest: Mapping[str, Any]) -> str:
    """The temperature, and what was cut off if anything was."""
    settings = manifest.get("settings") or {}
    cut = [f"{name} {settings[name]}" for name in ("top_p", "top_k") if name in settings]
    return ", ".join([_setting(manifest, "temperature"), *cut])


def _setting(manifest: Mapping[str, Any], *names: str) -> str:
    """A setting of the run, or something written beside its settings."""
    for settings in (manifest.get("settings") or {}, manifest):
        for name in names:
            if settings.get(name) is not None:
                return str(settings[name])
    return "not recorded"


def _named(runs: Sequence[RunReport]) -> list[RunReport]:
    choices: tuple[Callable[[RunReport], str], ...] = (
        lambda run: run.model.split("@")[0],  # without the address of its server
        lambda run: run.model,
        lambda run: run.path.resolve().name,
        lambda run: str(run.path),
    )
    for choose in choices:
        names = [choose(run) for run in runs]
        if len(set(names)) == len(runs):
            break
    return [dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def run_report_json(run: RunReport) -> dict[str, Any]:
    """The run's numbers as plain data; extreme questions in brief, with the ids of their passages."""
    boundary = run.boundary
    brief = {name: [_brief(row) for row in getattr(boundary, name)] for name in ("harmed", "helped")}
    numbers = dataclasses.asdict(dataclasses.replace(boundary, harmed=(), helped=()))
    about = {item.name: str(getattr(run, item.name)) for item in dataclasses.fields(run) if item.name != "boundary"}
    return {**about, **numbers, **brief}


def _brief(row: LabelRow) -> dict[str, Any]:
    sides = {"closed": row.closed, "open": row.open, "mask": row.mask}
    return {
        "id": row.id,
        "question": row.question,
        "answers": list(row.answers),
        **{name: side.text for name, side in sides.items() if side is not None},
        "mastery_change": change(row)[0],
        "benefit": row.benefit,
        "passages": [passage.id for passage in row.passages],
    }
