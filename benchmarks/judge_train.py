"""Judges, arbiters and their small relatives on the recorded answers of an 8B LLM: trained, and asked about test rows.

    python benchmarks/judge_train.py --big gguf:FILE --work FOLDER [--only NAME ...] [--print] [--parallel 5]

Each recipe (`judge_recipes.py`) is trained several times, each time without one fifth of the train rows; a row of that
fifth is scored by the judge that did not learn from it ("dev": thresholds are chosen there), test rows by the mean of
all. Each training is a process of its own, since one leaves most of a GPU idle. What is done is not done again:
finished trainings stay, unfinished ones go on after their last whole epoch. WORK/out has what is to be kept: ids and
scores, no texts.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import multiprocessing
import os
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.judge_recipes import FOLDS, LABELS, Case, Recipe, load_cases, mean_scores, recipes
from knowgate.core.files import write_json, write_text
from knowgate.stats.metrics import auroc

SIDE = {"known": "closed", "found": "open", "closed": "closed", "open": "open"}  # whose answer a column is about
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Job:
    """One training of a recipe; needs: files that must be there before it can begin."""

    name: str
    member: int
    needs: tuple[Path, ...]
    file: Path

    @property
    def title(self) -> str:
        return f"{self.name}:{self.member}"

    @property
    def is_done(self) -> bool:
        return self.file.is_file()

    @property
    def is_ready(self) -> bool:
        return all(path.is_file() for path in self.needs)


def jobs_of(plan: Sequence[Recipe], work: Path) -> list[Job]:
    members = {recipe.name: recipe.members for recipe in recipes()}
    said, found = work / LABELS / "0.json", list[Job]()
    for recipe in plan:
        needs = [work / name / f"{k}.json" for name in recipe.teacher for k in range(members[name])]
        if recipe.labels in ("implied", "said"):
            needs.append(said)
            found += [] if any(job.name == LABELS for job in found) else [Job(LABELS, 0, (), said)]
        found += [Job(recipe.name, k, tuple(needs), work / recipe.name / f"{k}.json") for k in range(recipe.members)]
    return found


class Worker:
    """A process that does one job after the other, so that libraries are loaded once."""

    def __init__(self, number: int, options: argparse.Namespace):
        ours, theirs = SPAWN.Pipe()
        self.connection, self.job = ours, None
        self.process = SPAWN.Process(target=work_off, args=(theirs, number, options), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, job: Job) -> None:
        self.connection.send((job.name, job.member))
        self.job = job

    @property
    def is_free(self) -> bool:
        """Whether its job is over, well or not; a process that died is free of it, too."""
        if self.job is not None and self.process.is_alive() and not self.connection.poll():
            return False
        if self.job is not None and self.connection.poll():
            with contextlib.suppress(EOFError):
                self.connection.recv()
        return True


def work_off(connection: Connection, number: int, options: argparse.Namespace) -> None:
    """What a worker does; its words go to a file."""
    from benchmarks.judge_job import do_job

    log = options.work / "logs" / f"worker-{number}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout = sys.stderr = log.open("a", encoding="utf-8", buffering=1)
    while True:
        name, member = connection.recv()
        print(f"--- {name}:{member}")
        do_job(name, member, options)  # an error ends the process: it stands in the file, and another takes its place
        connection.send("over")


def run_all(plan: Sequence[Recipe], options: argparse.Namespace) -> list[str]:
    """Every job that is not done, several at a time, in their order; gives the names of those that are not done."""
    start, end = time.monotonic(), time.monotonic() + 60 * options.minutes
    waiting = [job for job in jobs_of(plan, options.work) if not job.is_done and job.member >= options.first]
    os.environ.update(OMP_NUM_THREADS=str(options.threads), TOKENIZERS_PARALLELISM="false")
    workers = [Worker(number, options) for number in range(min(options.parallel, len(waiting)))]
    undone = list[str]()
    while time.monotonic() < end:
        for number, worker in enumerate(workers):
            if not worker.is_free:
                continue
            if worker.job is not None:
                undone += [] if worker.job.is_done else [worker.job.title]
                said = "done" if worker.job.is_done else f"FAILED, see logs/worker-{number}.txt"
                print(f"{time.monotonic() - start:5.0f} s {worker.job.title} {said}", flush=True)
                worker.job = None
                gather(plan, options)
            if not worker.process.is_alive():
                worker = workers[number] = Worker(number, options)
            if ready := next((job for job in waiting if job.is_ready), None):
                with contextlib.suppress(BrokenPipeError):  # it is just ending: its successor takes the job
                    worker.begin(ready)
                    waiting.remove(ready)
        if all(worker.job is None for worker in workers):
            break
        time.sleep(0.1)
    undone += [worker.job.title for worker in workers if worker.job is not None]
    for worker in workers:
        worker.process.terminate()
    return [*undone, *(job.title for job in waiting)]


def gather(plan: Sequence[Recipe], options: argparse.Namespace) -> None:
    """Predictions and facts of every recipe of which all trainings are done; all of them in one archive, if asked."""
    out: Path = options.work / "out"
    train, test = (_cases(split, options.limit) for split in ("train", "test"))
    for recipe in plan:
        files = [options.work / recipe.name / f"{k}.json" for k in range(recipe.members)]
        if (out / f"{recipe.name}.json").is_file() or not all(file.is_file() for file in files):
            continue
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / f"{recipe.name}.jsonl", "".join(_lines(recipe, found)))
        write_json(out / f"{recipe.name}.json", _about(recipe, found, train, test))
    if options.tar and out.is_dir():
        with tarfile.open(options.tar, "w:gz") as archive:
            archive.add(out, "judge")


_CASES: dict[str, list[Case]] = {}


def _cases(split: str, limit: int | None) -> list[Case]:
    return _CASES.setdefault(split, load_cases(split, limit))


def _lines(recipe: Recipe, found: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for split in ("dev", "test"):
        scores = mean_scores(found, split)
        for key in next(iter(scores.values())):
            row = {column: round(scores[column][key], 5) for column in SIDE if column in scores}
            lines.append(json.dumps({"id": key, "split": split, **row}) + "\n")
    return lines


def _about(
    recipe: Recipe, found: Sequence[dict[str, Any]], train: Sequence[Case], test: Sequence[Case]
) -> dict[str, Any]:
    cases = {case.question.id: case for case in (*train, *test)}
    each = {split: [_aurocs(one[split], cases) for one in found] for split in ("dev", "test")}
    return {
        "recipe": recipe.name,
        "base": found[0]["base"],
        "rows": found[0]["rows"],
        "lessons": found[0]["lessons"],
        "members": len(found),
        "folds": FOLDS,
        "epochs": recipe.epochs,
        "rate": recipe.rate,
        "batch": recipe.batch,
        "seconds": round(sum(one["seconds"] for one in found), 1),
        "scoring_seconds": round(sum(one["scoring_seconds"] for one in found), 1),
        "skipped": sum(one["skipped"] for one in found),
        "losses": [one["losses"] for one in found],
        "tokens_per_question": found[0]["tokens_per_question"],
        "auroc": {split: _aurocs(mean_scores(found, split), cases) for split in ("dev", "test")},
        "auroc_each": each,
        "device": found[0]["device"],
    }


def _aurocs(scores: dict[str, dict[str, float]], cases: dict[str, Case]) -> dict[str, float | None]:
    """Of each column: how well it ranks the answers it is about."""
    found = {}
    for column, by_id in scores.items():
        truth = np.array([cases[key].right[SIDE[column]] for key in by_id], dtype=bool)
        value = auroc(truth, np.array(list(by_id.values())))
        found[column] = None if value is None else round(value, 4)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--big", required=True, help="model spec of the 1.5B judge: gguf:FILE, hf:FOLDER")
    parser.add_argument("--work", type=Path, required=True, help="where everything is kept")
    parser.add_argument("--small", default="", help="other spec for every small base, for rehearsals: hf:FOLDER")
    parser.add_argument("--only", nargs="*", help="recipes of these names; NAME* for all that begin so")
    parser.add_argument("--first", type=int, default=0, help="leave out members before this, which are on record")
    parser.add_argument("--print", action="store_true", help="only show the trainings")
    parser.add_argument("--parallel", type=int, default=5, help="trainings at a time")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each")
    parser.add_argument(
        "--minutes", type=float, default=600, help="end after so many minutes; the same command goes on"
    )
    parser.add_argument("--limit", type=int, help="use the first questions of each split only")
    parser.add_argument("--tar", type=Path, help="archive that gets what is to be kept, after every training")
    return parser.parse_args()


def _is_named(name: str, wanted: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)


def main() -> None:
    options = parse()
    plan = [recipe for recipe in recipes() if not options.only or _is_named(recipe.name, options.only)]
    if options.print:
        for job in jobs_of(plan, options.work):
            print(job.title)
        return
    failed = run_all(plan, options)
    gather(plan, options)
    for file in sorted((options.work / "out").glob("*.json")):
        about = json.loads(file.read_text(encoding="utf-8"))
        if "recipe" in about:
            print(file.stem, about["auroc"], f"{about['seconds']:.0f} s, {about['skipped']} skipped", flush=True)
    print("not done: " + (", ".join(failed) or "nothing"))


if __name__ == "__main__":
    main()
