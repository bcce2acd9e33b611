"""Table of the time that judges take per question without a GPU, recorded by `benchmarks.judge_speed`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.judge_answers import HOME, JUDGES
from benchmarks.tables.common import Rows, table

SPEED = "speed.json"
NAMES = {
    "frozen:minilm": "frozen embeddings of MiniLM (two texts), linear head",
    "minilm": "MiniLM, 22M, `--base small`",
    "mpnet": "mpnet, 110M",
    "smollm": "SmolLM2-135M, torch fp32",
    "llamacpp:smollm": "SmolLM2-135M, exported (q8_0), llama.cpp",
    "gguf:qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": "Qwen2.5-Coder-1.5B, torch fp32",
    "llamacpp:gguf:qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": "Qwen2.5-Coder-1.5B, q4_k_m, llama.cpp",
}


def speed_table(home: Path = HOME) -> Iterator[str]:
    """Render the table, or nothing without a record."""
    file = home / JUDGES / SPEED
    if not file.is_file():
        return
    record = json.loads(file.read_text(encoding="utf-8"))
    reference = NAMES.get(record["reference"], record["reference"])
    yield "### What a question costs without a GPU\n"
    yield (
        f"{record['questions']} questions, one at a time, on {record['cores']} cores (x86-64), all judges in one process "
        f"and in turn; medians. The machine's load was {record['load'][0]:g}: where that is above {record['cores']}, other "
        f"work ran on the same cores, and the ratios, each to {reference} in the run beside it, say more than the "
        "milliseconds. `python -m benchmarks.judge_speed` measures it anew.\n"
    )
    rows: Rows = [
        (
            NAMES.get(name, name),
            "-" if cost["tokens"] is None else f"{cost['tokens']:.0f}",
            f"{cost['core_ms']:,.0f}",
            f"{cost['ms']:,.0f}",
            f"{cost['core_ratio']:.2g}",
            f"{cost['ratio']:.2g}",
        )
        for name, cost in record["judges"].items()
    ]
    columns = ("judge", "tokens", "ms of CPU time", "ms on the clock", "times as fast, CPU time", "on the clock")
    yield table(columns, rows)
