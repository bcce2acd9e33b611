"""Convert full label runs to the packed runs under `benchmarks/runs`: fit every gate, record its needs, drop texts.

    python -m benchmarks.record FULL_RUNS OUT [--gate [NAME=]DIR ...] [--pack RUN ...] [--printed DIR] [--only NAME]

FULL_RUNS holds the folders `NAME-train` and `NAME-test` that `knowgate label` wrote for one LLM (see
benchmarks/README.md). For each NAME, the script fits every gate that needs no LLM on the train run, scores the test run
and writes the needs to `needs.jsonl`. Needs that `eval --record` and `sweep dhicl` recorded in the test run are added.
Data sets with too few training questions use the gates of another data set. Questions, gold answers and passages are
not written.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.recording.gates import CachedEmbedder, GateFits, score_fitted_gate, score_skr
from benchmarks.recording.needs import read_file_needs, read_run_needs
from benchmarks.recording.packing import pack
from benchmarks.recording.printed_tables import copy_printed_tables

# Data sets with at most a hundred training questions -> data set whose train run is used instead.
TRAIN_SETS = {"temporalqa_ctx": "triviaqa_ctx", "freshqa": "triviaqa_ctx"}


def main() -> None:
    """Read the options and record all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("full", type=Path, help="folder of full label runs")
    parser.add_argument("out", type=Path, help="folder for the packed runs, named after the LLM")
    helps = {
        "--pack": "also pack this run, with its recorded needs, without fitting gates",
        "--needs": 'JSON file of needs: {"NAME-test|gate": {id: need}}',
    }
    for name, text in helps.items():
        parser.add_argument(name, type=Path, action="append", default=[], help=text)
    parser.add_argument(
        "--gate", action="append", default=[], help="also score this fitted gate, such as `fit uar` writes"
    )
    parser.add_argument(
        "--printed", type=Path, help="folder of tables printed by benchmarks.papers, copied next to OUT"
    )
    parser.add_argument("--only", help="record this data set only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        fits = GateFits(CachedEmbedder(), Path(scratch))
        for test in sorted(options.full.glob(f"{options.only or '*'}-test")):
            print(f"{options.full.name} {test.name}", flush=True)
            record(test, options.out, fits, options.gate, options.needs)
    for run in options.pack:
        pack(run, options.out / run.name, read_run_needs(run))
    if options.printed is not None:
        copy_printed_tables(options.printed, options.out.parent, options.out.name)


def record(test: Path, out: Path, fits: GateFits, gates: Sequence[str], files: Sequence[Path]) -> None:
    """Pack a test run with all needs, and its train run."""
    name = test.name.removesuffix("-test")
    train = test.parent / f"{name}-train"
    if train.is_dir():
        pack(train, out / train.name, [])
    pack(test, out / test.name, _collect_needs(name, test, fits, gates, files))


def _collect_needs(name: str, test: Path, fits: GateFits, gates: Sequence[str], files: Sequence[Path]) -> list[Any]:
    """Return the needs of every gate. Needs recorded with the LLM replace those of a gate fitted here."""
    from knowgate.data.runs.table import load_label_table

    table, records = load_label_table([test]), []
    train = test.parent / f"{TRAIN_SETS.get(name, name)}-train"
    if train.is_dir():
        records += fits.score(train, table)
        records += score_skr(train, table, fits.embedder, fits.scratch)
    for gate in gates:
        gate_name, _, path = gate.rpartition("=")
        folder = Path(path)
        records += score_fitted_gate(gate_name or folder.name, folder, table, f"fitted: {folder.name}")
    records += [*read_run_needs(test), *read_file_needs(files, test.name)]
    return list({record.gate: record for record in records}.values())


if __name__ == "__main__":
    main()
