"""Plans of `knowgate` commands that reproduce recorded results.

A plan yields steps, and each step is one command; `--print` shows the commands as you would type them. All steps run in
one process, so that the weights of a model are loaded once. Finished steps are skipped, and interrupted ones resume.
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

INFERENCE_COMMANDS = ("label", "prefer", "eval-rerank")  # They leave the weights of the model unchanged.
ENGLISH = ("nq", "triviaqa", "squad", "hotpotqa")


@dataclass(frozen=True)
class Step:
    """One `knowgate` command.

    Attributes:
        name: Name for `--only` and for the record of run times.
        words: Arguments of the command.
        output: File or folder that the command writes. If it exists, the step is skipped. None if the command itself
            detects what is already done.
        stdout_file: File in WORK/out that receives what the command prints.
    """

    name: str
    words: list[str]
    output: Path | None = None
    stdout_file: str | None = None


@dataclass(frozen=True)
class Plan:
    """The options that all plans share.

    Attributes:
        model: Spec of the LLM.
        bench: Benchmark folder (KNOWGATE_BENCH).
        work: Folder for everything that the steps write.
    """

    model: str
    bench: Path
    work: Path

    def path(self, *parts: str) -> str:
        """Return a path in the work folder as a command-line argument."""
        return str(self.work.joinpath(*parts))


def run_step(step: Step, out: Path) -> float:
    """Run a step unless it is done, and return the seconds it took (0 if skipped).

    A failed step prints its exit code and does not stop the plan, because later steps may not depend on it.
    """
    from knowgate.cli.main import run

    if step.output is not None and step.output.exists():
        return 0.0
    printed, start = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(printed), share_weights(step.words[0] in INFERENCE_COMMANDS):
        code = run(step.words)
    if code:
        print(f"  {step.name} failed with exit code {code}", flush=True)
    if step.stdout_file:
        (out / step.stdout_file).write_text(printed.getvalue(), encoding="utf-8")
    gc.collect()
    return time.perf_counter() - start


@contextlib.contextmanager
def share_weights(enabled: bool) -> Iterator[None]:
    """Let commands reuse the weights that an earlier command loaded.

    Training changes weights, so commands that train run with `enabled=False`, which also frees the shared weights.
    """
    from knowgate.models.hf import loader

    original, cached = loader.load_transformers, _cached_loader()
    if enabled:
        loader.load_transformers = cached
    else:
        cached.cache_clear()
        gc.collect()
    try:
        yield
    finally:
        loader.load_transformers = original


@functools.cache
def _cached_loader() -> Any:
    from knowgate.models.hf import loader

    return functools.cache(loader.load_transformers)


def pool_corpora(bench: Path, file: Path) -> None:
    """Write the passages of the four English corpora to one file, each passage id once."""
    if file.is_file():
        return
    passages: dict[str, str] = {}
    for name in ENGLISH:
        with gzip.open(bench / f"corpus_{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            for line in lines:
                passages.setdefault(json.loads(line)["id"], line)
    file.write_bytes(gzip.compress("".join(passages.values()).encode(), compresslevel=1))


def run_steps(steps: Iterable[Step], out: Path, prefixes: list[str] | None, *, print_only: bool) -> float:
    """Print and run steps, and return the seconds they took.

    Args:
        steps: Steps of a plan.
        out: Folder for printed tables and `seconds.json`, the run time of each step.
        prefixes: Run only steps whose names start with one of these; None runs all.
        print_only: Print the commands without running them.
    """
    seconds: dict[str, float] = {}
    for step in steps:
        if prefixes and not step.name.startswith(tuple(prefixes)):
            continue
        print(f"knowgate {shlex.join(step.words)}", flush=True)
        if not print_only:
            seconds[step.name] = round(run_step(step, out), 1)
            print(f"  {step.name}: {seconds[step.name]} s", flush=True)
            record_seconds(out / "seconds.json", step.name, seconds[step.name])
    return sum(seconds.values())


def record_seconds(file: Path, name: str, seconds: float) -> None:
    """Record the run time of a step, unless an earlier run of it took longer."""
    recorded = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if seconds > recorded.get(name, -1.0):
        file.write_text(json.dumps({**recorded, name: seconds}, indent=1) + "\n", encoding="utf-8")


def create_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all plans share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model spec, such as hf:FOLDER")
    parser.add_argument("--bench", type=Path, required=True, help="benchmark folder (KNOWGATE_BENCH)")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything that the steps write")
    parser.add_argument("--only", nargs="*", help="run only steps whose names start with one of these")
    parser.add_argument("--print", action="store_true", help="print the commands without running them")
    return parser


def prepare_work_folder(bench: Path, work: Path) -> Path:
    """Create the work folder and the pooled corpus, and return the output folder WORK/out."""
    os.environ["KNOWGATE_BENCH"] = str(bench)
    out = work / "out"
    out.mkdir(parents=True, exist_ok=True)
    pool_corpora(bench, work / "pooled.jsonl.gz")
    return out
