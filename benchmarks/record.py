"""Full label runs to what is committed under `benchmarks/runs`: fit every gate, keep its needs, drop the texts.

    python -m benchmarks.record FULL_RUNS OUT [--gate [NAME=]DIR ...] [--pack RUN ...] [--printed DIR] [--only NAME]

FULL_RUNS holds `NAME-train` and `NAME-test` folders of `knowgate label` of one model (see benchmarks/README.md). For
each NAME, every gate that label runs allow is fitted on the train run (no LLM), scores the test run, and its needs are
kept in `needs.jsonl`, beside those that were recorded in the test run where the LLM was (`eval --record`, `sweep
dhicl`). Sets without enough training questions of their own borrow the gates of another. --gate: a gate that was fitted
elsewhere (`fit uar`), scored on every test run of its LLM. --pack: a run that is only made small, with what gates and
second looks said of it. --printed: folder of tables that were printed where the LLM was (benchmarks/papers.py), kept
beside OUT. --needs FILE: {"NAME-test|gate": {id: need}}. Questions, gold answers and passages stay behind.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.recording.gates import CachedEmbedder, FittedOnce, neighbour_needs, scored_needs
from benchmarks.recording.packing import pack
from benchmarks.recording.printed import keep_printed
from benchmarks.recording.said import asked_needs, said_already

BORROWED = {"temporalqa_ctx": "triviaqa_ctx", "freshqa": "triviaqa_ctx"}  # no training questions, or a hundred


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("full", type=Path)
    parser.add_argument("out", type=Path)
    for name in ("--pack", "--needs"):
        parser.add_argument(name, type=Path, action="append", default=[])
    parser.add_argument("--gate", action="append", default=[])
    parser.add_argument("--printed", type=Path)
    parser.add_argument("--only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        fits = FittedOnce(CachedEmbedder(), Path(scratch))
        for test in sorted(options.full.glob(f"{options.only or '*'}-test")):
            print(f"{options.full.name} {test.name}", flush=True)
            record(test, options.out, fits, options.gate, options.needs)
    for run in options.pack:
        pack(run, options.out / run.name, said_already(run))
    if options.printed is not None:
        keep_printed(options.printed, options.out.parent, options.out.name)


def record(test: Path, out: Path, fits: FittedOnce, gates: Sequence[str], files: Sequence[Path]) -> None:
    """A test run and its train run made small; all needs beside the rows."""
    name = test.name.removesuffix("-test")
    for train in _there(test.parent / f"{name}-train"):
        pack(train, out / train.name, [])
    pack(test, out / test.name, _needs(name, test, fits, gates, files))


def _needs(name: str, test: Path, fits: FittedOnce, gates: Sequence[str], files: Sequence[Path]) -> list[Any]:
    """By name: what was fitted here, then what was said where the LLM was, which counts where both are there."""
    from knowgate.data.runs.table import load_label_table

    trial, found = load_label_table([test]), []
    for train in _there(test.parent / f"{BORROWED.get(name, name)}-train"):
        found += fits.needs(train, trial)
        found += neighbour_needs(train, trial, fits.embedder, fits.scratch)
    for gate in gates:
        called, _, folder = gate.rpartition("=")
        found += scored_needs(called or Path(folder).name, Path(folder), trial, f"fitted: {Path(folder).name}")
    found += [*said_already(test), *asked_needs(files, test.name)]
    return list({one.gate: one for one in found}.values())


def _there(run: Path) -> Iterator[Path]:
    """The run, if it was made."""
    if run.is_dir():
        yield run


if __name__ == "__main__":
    main()
