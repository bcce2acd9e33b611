"""Train judges and arbiters on the recorded answers of an 8B LLM, and score the test rows with them.

    python -m benchmarks.judge_train --big gguf:FILE --work FOLDER [--only NAME ...] [--print] [--parallel 5]

Each recipe (`judge_recipes.py`) is trained several times, each time without one fifth of the train rows. These rows are
the dev rows of that training: thresholds are chosen on their scores. Test rows get the mean score of all trainings.

Several processes train at once, since one training leaves most of a GPU idle. Call the command again to continue:
finished trainings are kept, and unfinished ones continue from their last checkpoint. WORK/out gets the predictions to
commit: ids and scores, no texts.
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

from benchmarks.judge_recipes import FOLDS, LABELS_JOB, Case, Recipe, list_recipes, load_cases, mean_scores
from knowgate.core.files import write_json, write_text
from knowgate.stats.metrics import auroc

# Side of the answer ("closed" or "open") that each column of the predictions is about.
COLUMN_SIDES = {"known": "closed", "found": "open", "closed": "closed", "open": "open"}
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Job:
    """One training of a recipe.

    Attributes:
        name: Name of the recipe, or `LABELS_JOB`.
        member: Number of the training.
        dependencies: Results of other jobs that must exist before this job can start.
        file: Result of the job.
    """

    name: str
    member: int
    dependencies: tuple[Path, ...]
    file: Path

    @property
    def title(self) -> str:
        """Name and number, for messages."""
        return f"{self.name}:{self.member}"

    @property
    def is_done(self) -> bool:
        """Whether the result exists."""
        return self.file.is_file()

    @property
    def is_ready(self) -> bool:
        """Whether all dependencies exist."""
        return all(path.is_file() for path in self.dependencies)


def list_jobs(plan: Sequence[Recipe], work: Path) -> list[Job]:
    """Return the jobs of all recipes, in the order of the plan."""
    members = {recipe.name: recipe.members for recipe in list_recipes()}
    labels_file, jobs = work / LABELS_JOB / "0.json", list[Job]()
    for recipe in plan:
        dependencies = [work / name / f"{k}.json" for name in recipe.teacher for k in range(members[name])]
        if recipe.labels in ("implied", "said"):
            dependencies.append(labels_file)
            if all(job.name != LABELS_JOB for job in jobs):
                jobs.append(Job(LABELS_JOB, 0, (), labels_file))
        jobs += [
            Job(recipe.name, k, tuple(dependencies), work / recipe.name / f"{k}.json") for k in range(recipe.members)
        ]
    return jobs


class Worker:
    """A process that runs one job after the other, so that it loads the libraries once."""

    def __init__(self, number: int, options: argparse.Namespace):
        parent_end, child_end = SPAWN.Pipe()
        self.connection, self.job = parent_end, None
        self.process = SPAWN.Process(target=run_worker, args=(child_end, number, options), daemon=True)
        self.process.start()
        child_end.close()

    def start(self, job: Job) -> None:
        """Send a job to the process."""
        self.connection.send((job.name, job.member))
        self.job = job

    @property
    def is_free(self) -> bool:
        """Whether the process has no job, has finished or failed its job, or has died."""
        if self.job is not None and self.process.is_alive() and not self.connection.poll():
            return False
        if self.job is not None and self.connection.poll():
            with contextlib.suppress(EOFError):
                self.connection.recv()
        return True


def run_worker(connection: Connection, number: int, options: argparse.Namespace) -> None:
    """Run jobs as they arrive. Output goes to `WORK/logs/worker-NUMBER.txt`.

    An exception ends the process. Its traceback is in the log, and the parent starts a new worker.
    """
    from benchmarks.judge_job import run_job

    log = options.work / "logs" / f"worker-{number}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout = sys.stderr = log.open("a", encoding="utf-8", buffering=1)
    while True:
        name, member = connection.recv()
        print(f"--- {name}:{member}")
        run_job(name, member, options)
        connection.send("finished")


def run_jobs(plan: Sequence[Recipe], options: argparse.Namespace) -> list[str]:
    """Run all jobs that have no result yet, several at a time.

    Returns:
        Titles of the jobs that failed or did not finish in time.
    """
    start, end = time.monotonic(), time.monotonic() + 60 * options.minutes
    waiting = [job for job in list_jobs(plan, options.work) if not job.is_done and job.member >= options.first]
    os.environ.update(OMP_NUM_THREADS=str(options.threads), TOKENIZERS_PARALLELISM="false")
    workers = [Worker(number, options) for number in range(min(options.parallel, len(waiting)))]
    unfinished = list[str]()
    while time.monotonic() < end:
        for number, worker in enumerate(workers):
            if not worker.is_free:
                continue
            if worker.job is not None:
                unfinished += [] if worker.job.is_done else [worker.job.title]
                outcome = "done" if worker.job.is_done else f"FAILED, see logs/worker-{number}.txt"
                print(f"{time.monotonic() - start:5.0f} s {worker.job.title} {outcome}", flush=True)
                worker.job = None
                write_results(plan, options)
            if not worker.process.is_alive():
                worker = workers[number] = Worker(number, options)
            if ready := next((job for job in waiting if job.is_ready), None):
                with contextlib.suppress(BrokenPipeError):  # The process just died; the next worker gets the job.
                    worker.start(ready)
                    waiting.remove(ready)
        if all(worker.job is None for worker in workers):
            break
        time.sleep(0.1)
    unfinished += [worker.job.title for worker in workers if worker.job is not None]
    for worker in workers:
        worker.process.terminate()
    return [*unfinished, *(job.title for job in waiting)]


def write_results(plan: Sequence[Recipe], options: argparse.Namespace) -> None:
    """Write predictions and training facts of every recipe whose trainings are all done.

    With `options.tar`, also pack all of them into one archive.
    """
    out: Path = options.work / "out"
    train, test = (_load_cases_once(split, options.limit) for split in ("train", "test"))
    for recipe in plan:
        files = [options.work / recipe.name / f"{k}.json" for k in range(recipe.members)]
        if (out / f"{recipe.name}.json").is_file() or not all(file.is_file() for file in files):
            continue
        results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / f"{recipe.name}.jsonl", "".join(_prediction_lines(results)))
        write_json(out / f"{recipe.name}.json", _describe_training(recipe, results, train, test))
    if options.tar and out.is_dir():
        with tarfile.open(options.tar, "w:gz") as archive:
            archive.add(out, "judge")


_CASES: dict[str, list[Case]] = {}


def _load_cases_once(split: str, limit: int | None) -> list[Case]:
    return _CASES.setdefault(split, load_cases(split, limit))


def _prediction_lines(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the predictions file."""
    lines = []
    for split in ("dev", "test"):
        scores = mean_scores(results, split)
        for key in next(iter(scores.values())):
            row = {column: round(scores[column][key], 5) for column in COLUMN_SIDES if column in scores}
            lines.append(json.dumps({"id": key, "split": split, **row}) + "\n")
    return lines


def _describe_training(
    recipe: Recipe, results: Sequence[dict[str, Any]], train: Sequence[Case], test: Sequence[Case]
) -> dict[str, Any]:
    """Return the content of the JSON file that accompanies the predictions."""
    cases = {case.question.id: case for case in (*train, *test)}
    each = {split: [_compute_aurocs(result[split], cases) for result in results] for split in ("dev", "test")}
    return {
        "recipe": recipe.name,
        "base": results[0]["base"],
        "rows": results[0]["rows"],
        "lessons": results[0]["lessons"],
        "members": len(results),
        "folds": FOLDS,
        "epochs": recipe.epochs,
        "rate": recipe.learning_rate,
        "batch": recipe.batch,
        "seconds": round(sum(result["seconds"] for result in results), 1),
        "scoring_seconds": round(sum(result["scoring_seconds"] for result in results), 1),
        "skipped": sum(result["skipped"] for result in results),
        "losses": [result["losses"] for result in results],
        "tokens_per_question": results[0]["tokens_per_question"],
        "auroc": {split: _compute_aurocs(mean_scores(results, split), cases) for split in ("dev", "test")},
        "auroc_each": each,
        "device": results[0]["device"],
    }


def _compute_aurocs(scores: dict[str, dict[str, float]], cases: dict[str, Case]) -> dict[str, float | None]:
    """Return the AUROC of each column for the correctness of the answers it is about."""
    aurocs = {}
    for column, by_id in scores.items():
        truth = np.array([cases[key].right[COLUMN_SIDES[column]] for key in by_id], dtype=bool)
        value = auroc(truth, np.array(list(by_id.values())))
        aurocs[column] = None if value is None else round(value, 4)
    return aurocs


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--big", required=True, help="model spec of the 1.5B judge: gguf:FILE or hf:FOLDER")
    parser.add_argument("--work", type=Path, required=True, help="folder for results, checkpoints and logs")
    parser.add_argument(
        "--small", default="", help="model spec that replaces every small base, for trial runs: hf:FOLDER"
    )
    parser.add_argument("--only", nargs="*", help="names of the recipes to train; patterns such as all-* are allowed")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first member to train; earlier members are already recorded"
    )
    parser.add_argument("--print", action="store_true", help="print the trainings and stop")
    parser.add_argument("--parallel", type=int, default=5, help="number of concurrent trainings")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each training")
    parser.add_argument(
        "--minutes", type=float, default=600, help="stop after this many minutes; call again to continue"
    )
    parser.add_argument("--limit", type=int, help="use only this many questions of each split")
    parser.add_argument("--tar", type=Path, help="archive to update with the predictions after every training")
    return parser.parse_args()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def main() -> None:
    """Run the command line."""
    options = parse_options()
    plan = [recipe for recipe in list_recipes() if not options.only or _matches(recipe.name, options.only)]
    if options.print:
        for job in list_jobs(plan, options.work):
            print(job.title)
        return
    unfinished = run_jobs(plan, options)
    write_results(plan, options)
    for file in sorted((options.work / "out").glob("*.json")):
        about = json.loads(file.read_text(encoding="utf-8"))
        if "recipe" in about:
            print(file.stem, about["auroc"], f"{about['seconds']:.0f} s, {about['skipped']} skipped", flush=True)
    print("unfinished trainings: " + (", ".join(unfinished) or "none"))


if __name__ == "__main__":
    main()
