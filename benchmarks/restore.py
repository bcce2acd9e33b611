"""Restore the questions of packed runs, so that you can fit and score gates without labeling again.

    python -m benchmarks.restore benchmarks/runs/LLM OUT [--only NAME ...]

Questions, gold answers and choices are read by id from the benchmark folder (KNOWGATE_BENCH). Passages, samples and
hidden states cannot be restored; gates that need them need `knowgate label`. Recorded needs are kept. To pack the runs
again, with the needs that you recorded since:

    python -m benchmarks.record EMPTY_FOLDER benchmarks/runs/LLM --pack OUT/NAME ...
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
    """Read the options and restore all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of packed runs")
    parser.add_argument("out", type=Path, help="folder for the restored runs")
    parser.add_argument("--only", nargs="*", help="restore only the runs with these names")
    options = parser.parse_args()
    for run in sorted(file.parent for file in options.runs.glob("*/run.json")):
        if not options.only or run.name in options.only:
            print(f"{run.name}: {restore(run, options.out / run.name)} questions", flush=True)


def restore(run: Path, out: Path) -> int:
    """Restore the questions of a run and return their number."""
    from knowgate.data.questions import load_questions
    from knowgate.data.runs.folder import RunFolder
    from knowgate.data.runs.rows import row_to_json

    spec = str(RunFolder(run).manifest()["settings"]["data"]).partition("+")[0]
    questions = {question.id: question for question in load_questions(spec)}
    shutil.copytree(run, out, dirs_exist_ok=True)
    lines = [json.dumps(row_to_json(_restore_row(row, questions)), ensure_ascii=False) for row in RunFolder(run).rows()]
    with gzip.GzipFile(out / "labels.jsonl.gz", "wb", mtime=0) as file:
        file.write(("\n".join(lines) + "\n").encode())
    return len(lines)


def _restore_row(row: Any, questions: Mapping[str, Any]) -> Any:
    question = questions[row.id]
    return replace(
        row, question=question.text, answers=tuple(question.answers), choices=tuple(question.choices or ())
    )  # fmt: skip


if __name__ == "__main__":
    main()
