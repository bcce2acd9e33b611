"""The tables of `docs/speed.md`, as `benchmarks.speed` and `benchmarks.label_speed` recorded them."""

from __future__ import annotations

import json
from pathlib import Path

RECORD = Path(__file__).parents[1] / "speed.json"
LABELING = Path(__file__).parents[1] / "runs" / "label_speed.json"
THREADS, EARLIER = LABELING.with_stem("label_speed_threads"), LABELING.with_stem("label_speed_earlier")
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
    """Render questions labeled per second on a GPU, next to plain `generate`, to threads and to an earlier run."""
    record, threads, earlier = (json.loads(file.read_text(encoding="utf-8")) for file in (LABELING, THREADS, EARLIER))
    lines = [
        "| label run | questions/s | one `generate` call at a time | ratio | GPU busy | questions/s, threads | questions/s, "
        "earlier run |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in SETTINGS:
        speed, plain = record[name]["questions_per_second"], record[f"{name}, generate"]
        other = f"{threads[name]['questions_per_second']:.0f}" if name in threads else "–"
        lines.append(
            f"| {name} | {speed:.0f} | {plain:.1f} | **{speed / plain:.0f}** | {100 * record[name]['gpu_busy']:.0f} % "
            f"| {other} | {earlier[name]['questions_per_second']:.0f} |"
        )
    return "\n".join(lines)
