"""Recorded runs with their questions put back, so that gates can be fitted and asked again without labelling again.

    python -m benchmarks.restore benchmarks/runs/LLM OUT [--only NAME ...]

Ids lead to questions, gold answers and choices in the benchmark folder (KNOWGATE_BENCH). Passages, samples and hidden
states are not there: what needs them needs `knowgate label`. What gates said stays on record, and

    python -m benchmarks.record NOTHING benchmarks/runs/LLM --pack OUT/NAME ...

makes the runs small again, with what was said since.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", help="runs of these names")
    options = parser.parse_args()
    for run in sorted(file.parent for file in options.runs.glob("*/run.json")):
        if not options.only or run.name in options.only:
            print(f"{run.name}: {restore(run, options.out / run.name)} questions", flush=True)


def restore(run: Path, out: Path) -> int:
    """How many rows the run has."""
    from knowgate.data.questions import load_questions
    from knowgate.data.runs.folder import RunFolder
    from knowgate.data.runs.rows import row_to_json

    spec = str(RunFolder(run).manifest()["settings"]["data"]).partition("+")[0]
    asked = {question.id: question for question in load_questions(spec)}
    shutil.copytree(run, out, dirs_exist_ok=True)
    lines = [json.dumps(row_to_json(_asked(row, asked)), ensure_ascii=False) for row in RunFolder(run).rows()]
    with gzip.GzipFile(out / "labels.jsonl.gz", "wb", mtime=0) as file:
        file.write(("\n".join(lines) + "\n").encode())
    return len(lines)


def _asked(row: Any, asked: Mapping[str, Any]) -> Any:
    question = asked[row.id]
    return replace(
        row, question=question.text, answers=tuple(question.answers), choices=tuple(question.choices or ())
    )  # fmt: skip


if __name__ == "__main__":
    main()
