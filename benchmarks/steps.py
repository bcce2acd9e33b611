"""Recorded work as steps, each a `knowgate` command that --print shows as one would type it.

Steps run in one process, so that weights are read once. What is done already is not done again: commands go on where
they stopped, and folders that are there stay.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import gzip
import io
import json
import os
import shlex
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READERS = ("label", "prefer", "eval-rerank")
ENGLISH = ("nq", "triviaqa", "squad", "hotpotqa")


@dataclass(frozen=True)
class Step:
    """One command. made: a folder whose being there says that it is done; None for commands that know by themselves.

    shown: the file of WORK/out that gets what it prints.
    """

    name: str
    words: list[str]
    made: Path | None = None
    shown: str | None = None


def run_step(step: Step, out: Path) -> float:
    """Seconds it took; 0 where it was done before. One that fails is said; the steps after it may not need it."""
    from knowgate.cli.main import run

    if step.made is not None and step.made.exists():
        return 0.0
    printed, start = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(printed), weights_kept(step.words[0] in READERS):
        code = run(step.words)
    if code:
        print(f"  {step.name} ended with {code}", flush=True)
    if step.shown:
        (out / step.shown).write_text(printed.getvalue(), encoding="utf-8")
    gc.collect()
    return time.perf_counter() - start


@contextlib.contextmanager
def weights_kept(kept: bool) -> Iterator[None]:
    """Commands open the model by its spec; those that only read share its weights, training changes them."""
    from knowgate.models.hf import loader as load

    plain, shared = load.load_transformers, _shared()
    if kept:
        load.load_transformers = shared
    else:
        shared.cache_clear()
        gc.collect()
    try:
        yield
    finally:
        load.load_transformers = plain


@functools.cache
def _shared() -> Any:
    from knowgate.models.hf import loader as load

    return functools.cache(load.load_transformers)


def pool_corpora(bench: Path, file: Path) -> None:
    """The four English corpora as one file; a passage that is in two of them has one id, and comes once."""
    if file.is_file():
        return
    passages: dict[str, str] = {}
    for name in ENGLISH:
        with gzip.open(bench / f"corpus_{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            for line in lines:
                passages.setdefault(json.loads(line)["id"], line)
    file.write_bytes(gzip.compress("".join(passages.values()).encode(), compresslevel=1))


def walk(steps: Iterable[Step], out: Path, only: list[str] | None, *, shows: bool) -> float:
    """Do the steps whose names begin as asked, or only show them; seconds in all. Their seconds come to OUT."""
    seconds: dict[str, float] = {}
    for step in steps:
        if only and not step.name.startswith(tuple(only)):
            continue
        print(f"knowgate {shlex.join(step.words)}", flush=True)
        if not shows:
            seconds[step.name] = round(run_step(step, out), 1)
            print(f"  {step.name}: {seconds[step.name]} s", flush=True)
            note_seconds(out / "seconds.json", step.name, seconds[step.name])
    return sum(seconds.values())


def note_seconds(file: Path, name: str, took: float) -> None:
    """Steps that were done before keep the seconds they took then."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if took > known.get(name, -1.0):
        file.write_text(json.dumps({**known, name: took}, indent=1) + "\n", encoding="utf-8")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What all plans are told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model spec; hf:FOLDER")
    parser.add_argument("--bench", type=Path, required=True, help="benchmark folder (KNOWGATE_BENCH)")
    parser.add_argument("--work", type=Path, required=True, help="where everything is kept")
    parser.add_argument("--only", nargs="*", help="steps whose names begin so")
    parser.add_argument("--print", action="store_true", help="only show the commands")
    return parser


def begin(bench: Path, work: Path) -> Path:
    """The folder for what is to be kept."""
    os.environ["KNOWGATE_BENCH"] = str(bench)
    out = work / "out"
    out.mkdir(parents=True, exist_ok=True)
    pool_corpora(bench, work / "pooled.jsonl.gz")
    return out
