"""The tables of `docs/speed.md`, as `benchmarks.speed` and `benchmarks.label_speed` recorded them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "speed.json"
LABELING = Path(__file__).parents[1] / "runs" / "label_speed.json"
BEFORE = LABELING.with_stem("label_speed_before")  # runs of the version before and of this one, in turns
SETTINGS = ("closed book", "BM25", "BM25, 20 samples")


def speed_table() -> str:
    """Render the recorded ratios."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    lines = [
        f"Measured on {record['cores']} cores. {record['note']}",
        "",
        "| what | compared with | ratio of times | seconds | seconds of the other |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['what']} | {row['compared_with']} | **{row['ratio']:g}** | {row['seconds']:g} | {row['other_seconds']:g} |"
        for row in record["figures"]
    ]
    return "\n".join(lines)


def labeling_table() -> str:
    """Render questions labeled per second on a GPU, next to plain `generate` and to the version before."""
    record = json.loads(LABELING.read_text(encoding="utf-8"))
    turns = json.loads(BEFORE.read_text(encoding="utf-8"))
    lines = [
        "| label run | questions/s | one `generate` call at a time | ratio | GPU busy | in turns: this version | in turns: "
        "the version before |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in SETTINGS:
        speed, plain = record[name]["questions_per_second"], record[f"{name}, generate"]
        now, before = (_list_speeds(turns, version, name) for version in ("now", "before"))
        lines.append(
            f"| {name} | {speed:.0f} | {plain:.1f} | **{speed / plain:.0f}** | {100 * record[name]['gpu_busy']:.0f} % "
            f"| {now} | {before} |"
        )
    return "\n".join(lines)


def _list_speeds(turns: dict[str, Any], version: str, setting: str) -> str:
    """Return the questions per second of each run of a version in a setting, such as '211, 202'."""
    runs = [run for run, of in zip(turns["runs"], turns["order"], strict=True) if of == version and setting in run]
    return ", ".join(f"{run[setting]['questions_per_second']:.0f}" for run in runs)
