"""The table of `docs/speed.md`, as `benchmarks.speed` recorded it."""

from __future__ import annotations

import json
from pathlib import Path

RECORD = Path(__file__).parents[1] / "speed.json"


def speed_table() -> str:
    """The recorded ratios as a table."""
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
