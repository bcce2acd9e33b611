"""IK: train one LoRA judge per data set and score the test questions of all data sets with each.

    python -m benchmarks.ik_transfer prepare --tokenizer FOLDER --rows FILE                  minutes on a CPU
    python -m benchmarks.ik_transfer train --model FOLDER --tokenizer FOLDER --rows FILE --out FOLDER         on a GPU
    python -m benchmarks.ik_transfer record --rows FILE --out FOLDER

`prepare` reads the recorded label runs and the benchmark folder (KNOWGATE_BENCH). Its file holds token ids and labels,
so `train` needs no benchmark data. A second call of `train` continues: finished judges are not trained again. After
`--seconds` it stops. `record` writes the predictions to `runs/papers`, without questions.

Protocol, written before the run.

- *Rows.* The recorded label runs of Qwen2.5-Coder-1.5B. The judge reads IK's prompt with the question and the first 32
  tokens of the LLM's own closed-book answer. These answers have 32 tokens at most, so it reads all of them. Label: the
  greedy closed-book answer is right. Train rows whose question occurs in any of the test sets are left out.
- *Judges.* One LoRA adapter per data set with at least 200 train rows, and one of all these train rows (*pooled*). Each
  has one seed and two epochs; otherwise the recipe of `paper_training` (rate 1e-4, batches of 32, rank 16, no class
  weights). *Untrained* is the same LLM without an adapter. Nothing is chosen, so there are no dev rows.
- *Test.* Every judge scores every test row once. The test rows are not fresh: other gates were compared on them. No judge
  learns from TemporalQA, CMRC 2018 and FreshQA; they show what the pooled judge does on a data set that is new to it.
- *Report.* AUROC of known for each pair of train and test set. For each test set, with 95 % bootstrap intervals: the
  judge of its own train rows, the judge of NQ (the paper trains on NQ and tests on other data sets), the pooled judge,
  and the paired difference of pooled and own. Share of right verdicts (Yes more likely than No) of these judges beside
  the share of the commoner verdict. If the GPU time ends early, the missing judges are named.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.paper_record import HOME, add_trainings, write_record
from benchmarks.policy_rows import Sequences
from benchmarks.tables.common import CHOICE, FRESH, OPEN, QWEN, RUNS

if TYPE_CHECKING:
    from benchmarks.policy_training import Job

RECORD = HOME / "ik_transfer.jsonl.gz"
TESTED = (*OPEN, *CHOICE, FRESH)
POOLED, UNTRAINED = "pooled", "untrained"
TOKENS = 32  # of the answer that the judge reads (T in the paper)
EPOCHS = 2
MIN_TRAIN_ROWS = 200
INDEX, PREDICTIONS = "index.json", "predictions.npz"


# --- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradedQuestion:
    """A question with the LLM's closed-book answer and whether it is right."""

    question: Any
    answer: str
    is_right: bool


def read_graded(name: str, split: str, runs: Path = RUNS / QWEN) -> list[GradedQuestion]:
    """Return the graded questions of a recorded label run; empty if there is no such run."""
    from knowgate.data.questions import load_questions
    from knowgate.data.runs.folder import RunFolder

    folder = RunFolder(runs / f"{name}-{split}")
    if not folder.path.is_dir():
        return []
    questions = {question.id: question for question in load_questions(str(folder.manifest()["settings"]["data"]))}
    return [
        GradedQuestion(questions[row.id], row.closed.text, bool(row.closed.correct))
        for row in folder.rows()
        if row.closed is not None and row.closed.correct is not None
    ]


def drop_tested(train: Sequence[GradedQuestion], tested: set[str]) -> list[GradedQuestion]:
    """Return the train rows whose question is in no test set."""
    from knowgate.data.splits import fingerprint_text_loosely

    return [row for row in train if fingerprint_text_loosely(row.question.text) not in tested]


def encode(tokenizer: Any, rows: Sequence[GradedQuestion], *, is_test: bool) -> Sequences:
    """Tokenize IK's prompts; the label position is the last token."""
    from knowgate.models.prompts.questions import build_ik_prompt

    answers = [tokenizer.encode(row.answer.strip(), add_special_tokens=False)[:TOKENS] for row in rows]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": build_ik_prompt(row.question, tokenizer.decode(answer).strip())}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for row, answer in zip(rows, answers, strict=True)
    ]
    ids = [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    targets = [[float(row.is_right)] for row in rows]
    return Sequences(ids, [[len(each) - 1] for each in ids], targets, [-1 if is_test else 0] * len(ids))


def prepare(tokenizer: Any, file: Path, limit: int | None = None) -> dict[str, Any]:
    """Write one file with the rows of all data sets, and return what it holds.

    Args:
        tokenizer: Tokenizer of the judge.
        file: Path of the tar file to write.
        limit: Maximum number of rows of each run, to try the steps out.
    """
    from knowgate.data.splits import fingerprint_text_loosely

    tests = {name: rows[:limit] for name in TESTED if (rows := read_graded(name, "test"))}
    tested = {fingerprint_text_loosely(row.question.text) for rows in tests.values() for row in rows}
    runs = {name: drop_tested(read_graded(name, "train")[:limit], tested) for name in tests}
    least = MIN_TRAIN_ROWS if limit is None else 1
    trains = {name: rows for name, rows in runs.items() if len(rows) >= least}
    index = {
        "train": {
            name: {"rows": len(rows), "known": sum(row.is_right for row in rows)} for name, rows in trains.items()
        },
        "test": {name: [[row.question.id, int(row.is_right)] for row in rows] for name, rows in tests.items()},
    }
    with tarfile.open(file, "w") as archive:
        for split, part in (("train", trains), ("test", tests)):
            for name, rows in part.items():
                _add_rows(archive, f"{name}-{split}.npz", encode(tokenizer, rows, is_test=split == "test"))
        _add_bytes(archive, INDEX, json.dumps(index).encode())
    return index


def _add_rows(archive: tarfile.TarFile, name: str, rows: Sequences) -> None:
    buffer = io.BytesIO()
    rows.save(buffer)
    _add_bytes(archive, name, buffer.getvalue())


def _add_bytes(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def read_index(file: Path) -> dict[str, Any]:
    """Return the train and test sets of a rows file: their sizes, and the id and label of each test row."""
    with tarfile.open(file) as archive:
        content = archive.extractfile(INDEX)
        assert content is not None
        return dict(json.load(content))


# --- training -------------------------------------------------------------------------------------


def plan_jobs(index: dict[str, Any]) -> list[Job]:
    """List the trainings: first the pooled judge, which takes longest, then by the number of train rows."""
    from benchmarks.policy_training import Job

    tests = tuple(f"{name}-test" for name in index["test"])
    order = sorted(index["train"], key=lambda name: -index["train"][name]["rows"])
    shared: dict[str, Any] = {"member": -1, "also": tests, "rate": 1e-4, "batch": 32, "labels": ("Yes", "No")}
    pooled, *single = (
        Job(name, sets=tuple(f"{each}-train" for each in sets), epochs=EPOCHS, **shared)
        for name, sets in ((POOLED, order), *((name, [name]) for name in order))
    )
    # One step at rate 0 changes nothing: these are the scores of the LLM without an adapter.
    untrained = Job(UNTRAINED, sets=(f"{order[-1]}-train",), epochs=1, rows=32, **{**shared, "rate": 0.0})
    return [pooled, untrained, *single]


def train_judges(options: argparse.Namespace) -> None:
    """Train and score all judges that are missing, then write the predictions of those that are finished."""
    from benchmarks.policy_training import start_workers

    index = read_index(options.rows)
    options.out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(options.rows) as archive:
        archive.extractall(options.out / "rows", filter="data")
    options.rows = options.out / "rows"
    end = time.time() + options.seconds
    processes = start_workers(options, plan_jobs(index))
    for process in processes:
        process.join(max(0.0, end - time.time()))
    for process in processes:
        process.terminate()
        process.join()
    collect_predictions(options.out, index)


def collect_predictions(out: Path, index: dict[str, Any]) -> None:
    """Write the logits of all finished judges, in the order of the test rows, and how long each took."""
    logits, facts, missing = {}, {}, []
    for job in plan_jobs(index):
        if not (out / job.file).is_file():
            missing.append(job.name)
            continue
        part = np.load(out / job.file)
        logits[job.name] = part["logits"][:, 0, 0].astype(np.float32)
        facts[job.name] = json.loads(str(part["facts"]))
    np.savez_compressed(out / PREDICTIONS, facts=np.array(json.dumps(facts)), **logits)
    print(f"finished: {', '.join(logits) or 'none'}; missing: {', '.join(missing) or 'none'}", flush=True)


# --- record ---------------------------------------------------------------------------------------


def list_records(index: dict[str, Any], predictions: Any) -> Iterator[dict[str, Any]]:
    """Yield a head with the judges and their train rows, then one line per test row."""
    judges = [name for name in (UNTRAINED, *index["train"], POOLED) if name in predictions]
    yield {"judges": judges, "train": {name: index["train"][name] for name in judges if name in index["train"]}}
    rows = [(name, *row) for name, part in index["test"].items() for row in part]
    columns = np.column_stack([predictions[name] for name in judges])
    for (name, question_id, is_right), values in zip(rows, columns.tolist(), strict=True):
        yield {"set": name, "id": question_id, "right": is_right, "logits": [round(value, 3) for value in values]}


def write_predictions(options: argparse.Namespace) -> None:
    """Write the record of all judges, and add their seconds and losses to the record of trainings."""
    predictions = np.load(options.out / PREDICTIONS)
    write_record(RECORD, list_records(read_index(options.rows), predictions))
    facts = json.loads(str(predictions["facts"]))
    add_trainings({f"transfer_{name}": values for name, values in facts.items()})


def main() -> None:
    """Run one of the three steps."""
    first = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    first.add_argument("step", choices=("prepare", "train", "record"))
    if len(sys.argv) < 3:
        first.parse_args()
    step, words = first.parse_args(sys.argv[1:2]).step, sys.argv[2:]
    if step == "train":
        from benchmarks.policy_training import make_parser

        parser = make_parser(__doc__)
        parser.add_argument("--seconds", type=float, default=550, help="stop the workers after this time")
        parser.set_defaults(label=False)
        train_judges(parser.parse_args(words))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path, required=True, help="the file of rows")
    if step == "record":
        parser.add_argument("--out", type=Path, required=True, help="output folder of the step train")
        write_predictions(parser.parse_args(words))
        return
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--limit", type=int, help="rows of each run, for rehearsals")
    options = parser.parse_args(words)
    from transformers import AutoTokenizer

    index = prepare(AutoTokenizer.from_pretrained(options.tokenizer), options.rows, options.limit)
    print(json.dumps({"train": index["train"], "test": {name: len(rows) for name, rows in index["test"].items()}}))


if __name__ == "__main__":
    main()
