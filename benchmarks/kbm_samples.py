"""KBM with 30 samples for every train question, and CBDR's probe on the same rows. Every step is a `knowgate` command.

    python -m benchmarks.kbm_samples --model hf:FOLDER --bench FOLDER --work FOLDER --prepare --tokenizer FOLDER --indexes FOLDER
    python -m benchmarks.kbm_samples --model hf:FOLDER --bench FOLDER --work FOLDER [--only NAME ...] [--print]

The protocol is in `policy_protocol.md`. --prepare runs on a CPU. It writes the questions to label to WORK/data (every
fourth train question with its passages) and the judge's prompts to WORK/rows. The other steps need WORK only, not the
benchmark folder. Steps can run in several processes at once (`--only label-with`, `--only label-alone`). Finished steps
are skipped, and interrupted ones resume. `--only targets` adds the labels to the prompts, for `paper_training`; if WORK
has no label runs, it adds the recorded labels. `--only keep` copies the labels and the probes' confidence, without
texts, to WORK/out.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kbm_rows import CERTAINTY_GRID, MASTERY_TAUS, MIN_CERTAIN_SHARE, K, KbmRow, encode, is_recorded_index
from benchmarks.papers import SETS
from benchmarks.policy_rows import Sequences
from benchmarks.steps import Plan, Step, create_parser, run_steps
from benchmarks.tables.common import QWEN, RUNS

EVERY = 4  # each how many train questions one is also taught with passages
SAMPLES = "30"
ROWS = "kbm30_rows"
PARTS = ("with", "alone")


@dataclass(frozen=True)
class SamplesPlan(Plan):
    """The steps after `--prepare`."""

    def steps(self) -> Iterator[Step]:
        """Yield the label runs, then the probes."""
        yield from (self.label(name, part) for part in PARTS for name in self.sets(part))
        yield from (self.label(name, "test") for name in self.sets("test"))
        for name in self.sets("test"):
            if runs := [self.path(f"{name}-{part}") for part in PARTS if name in self.sets(part)]:
                yield from self.probe(name, runs)

    def sets(self, part: str) -> list[str]:
        """List the data sets that have questions of a part."""
        return [name for name in SETS if self.data_file(name, part).is_file()]

    def data_file(self, name: str, part: str) -> Path:
        """Return the file with the questions of a part."""
        return self.work / "data" / f"{name}_{part}" / f"{'test' if part == 'test' else 'train'}.jsonl.gz"

    def label(self, name: str, part: str) -> Step:
        """Label a part: with samples with and without passages, with samples without them, or greedily without them."""
        data = f"bench:{name}_{part}/{self.data_file(name, part).name.partition('.')[0]}"
        words = ["label", "--data", data, "--model", self.model, "--layers", "mid"]
        words += ["--samples", "0" if part == "test" else SAMPLES]
        words += ["--open-samples", SAMPLES] if part == "with" else ["--closed-book"]
        return Step(f"label-{part}-{name}", [*words, "--out", self.path(f"{name}-{part}")])

    def probe(self, name: str, runs: Sequence[str]) -> Iterator[Step]:
        """Fit CBDR's probe on the train runs of a data set and record its confidence in the test questions."""
        folder = self.path(f"probe-{name}")
        labels = [word for run in runs for word in ("--labels", run)]
        words = ["fit", "probe", *labels, "--target", "known", "--layer", "mid", "--balanced", "--out", folder]
        yield Step(f"probe-fit-{name}", words, Path(folder))
        words = ["eval", "--labels", self.path(f"{name}-test"), "--gates", folder, "--record", "--resamples", "0"]
        yield Step(f"probe-score-{name}", words)


# --- questions and prompts ------------------------------------------------------------------------


def prepare(plan: SamplesPlan, tokenizer_folder: str, indexes: Path, most: int) -> None:
    """Write the questions to label and the prompts of the judge, without targets."""
    from transformers import AutoTokenizer

    os.environ["KNOWGATE_BENCH"] = str(plan.bench)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rows: list[KbmRow] = []
    for name in SETS:
        records = _read_records(plan.bench, name)
        for part, questions in read_questions(name, indexes, most):
            write_questions(plan.data_file(name, part), records, questions)
            rows += [KbmRow(name, each.row, each.question, (), each.is_test) for each in questions]
            rows += [each for each in questions if each.passages]
    ids = [encode(tokenizer, each) for each in rows]
    targets = [[float("nan")] * (len(MASTERY_TAUS) + 1)] * len(ids)
    folder = plan.work / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    folds = [-1 if each.is_test else 0 for each in rows]
    Sequences(ids, [[len(each) - 1] for each in ids], targets, folds).save(folder / f"{ROWS}.npz")
    with gzip.open(folder / f"{ROWS}.jsonl.gz", "wt", encoding="utf-8") as file:
        for each in rows:
            record = {"set": each.set_name, "id": each.row.id, "passages": len(each.passages), "test": each.is_test}
            file.write(json.dumps(record) + "\n")
    print(f"{len(rows)} prompts, {sum(map(len, ids))} tokens, {sum(each.is_test for each in rows)} of test questions")


def read_questions(name: str, indexes: Path, most: int) -> Iterator[tuple[str, list[KbmRow]]]:
    """Yield the parts of a data set: with passages, without them, and the test questions."""
    from knowgate.data.questions import load_questions
    from knowgate.data.runs.folder import RunFolder
    from knowgate.data.splits import fingerprint_text_loosely
    from knowgate.retrieval import load_retriever

    corpus = SETS[name].corpus
    retriever = load_retriever(str(indexes / f"idx-{corpus}")) if corpus not in ("", "own") else None
    recorded = RUNS / QWEN / f"{name}-test"
    is_same = is_recorded_index(recorded, retriever)  # otherwise the recorded answers were given with other passages
    ids = [row.id for row in RunFolder(recorded).rows()][:most]
    by_id = {question.id: question for question in load_questions(f"bench:{name}/test")}
    test = [by_id[each] for each in ids]
    seen = {fingerprint_text_loosely(question.text) for question in test}
    train = load_questions(f"bench:{name}/train") if SETS[name].train else []
    train = [question for question in train if fingerprint_text_loosely(question.text) not in seen][:most]
    taught = train[::EVERY] if corpus else []
    rest = [question for number, question in enumerate(train) if not corpus or number % EVERY]
    for part, questions in (("with", taught), ("alone", rest), ("test", test)):
        passages: Sequence[Sequence[Any]] = [()] * len(questions)
        if part != "alone" and questions and corpus == "own":
            passages = [question.contexts or () for question in questions]
        elif part != "alone" and questions and retriever is not None and (part == "with" or is_same):
            passages = retriever.search([question.text for question in questions], K)
        pairs = zip(questions, passages, strict=True)
        yield part, [KbmRow(name, question, question, tuple(found), part == "test") for question, found in pairs]


def _read_records(bench: Path, name: str) -> dict[str, dict[str, Any]]:
    """Read the records of a data set by id."""
    records = {}
    for file in sorted((bench / name).glob("t*.jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            records |= {record["id"]: record for record in map(json.loads, lines)}
    return records


def write_questions(file: Path, records: dict[str, dict[str, Any]], questions: Sequence[KbmRow]) -> None:
    """Write questions to label; test questions are labeled without passages."""
    if not questions:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        for each in questions:
            record = {key: value for key, value in records[each.question.id].items() if key != "contexts"}
            if each.passages and not each.is_test:
                texts = [{"id": text.id, "title": text.title, "text": text.text} for text in each.passages]
                record["contexts"] = texts
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")


# --- labels ---------------------------------------------------------------------------------------


def read_labels(plan: SamplesPlan) -> dict[tuple[str, str, bool], tuple[float, float]]:
    """Return mastery and certainty of the train questions by data set, id and whether passages were shown.

    If WORK has no label runs, the recorded labels are returned.
    """
    from benchmarks.paper_record import KBM_30_LABELS, read_record
    from knowgate.data.runs.folder import RunFolder

    if not any((plan.work / f"{name}-{part}").is_dir() for part in PARTS for name in plan.sets(part)):
        rows = read_record(KBM_30_LABELS)
        return {(row["set"], row["id"], row["passages"]): (row["mastery"], row["certainty"]) for row in rows}
    labels = {}
    for part in PARTS:
        for name in plan.sets(part):
            if not (plan.work / f"{name}-{part}").is_dir():
                continue
            for row in RunFolder(plan.work / f"{name}-{part}").rows():
                for answer, has_passages in ((row.closed, False), (row.open, True)):
                    if answer is not None and answer.mastery is not None and answer.certainty is not None:
                        labels[name, row.id, has_passages] = (answer.mastery, answer.certainty)
    return labels


def add_targets(plan: SamplesPlan) -> None:
    """Add the labels to the prompts; the prompts of unlabeled questions teach nothing."""
    labels = read_labels(plan)
    certainty = np.array([value[1] for key, value in labels.items() if not key[2]])
    tau = next((tau for tau in CERTAINTY_GRID if (certainty >= tau).mean() >= MIN_CERTAIN_SHARE), CERTAINTY_GRID[-1])
    file = plan.work / "rows" / f"{ROWS}.npz"
    rows, prompts = dict(np.load(file)), read_prompts(plan)
    for number, each in enumerate(prompts):
        if (label := labels.get((each["set"], each["id"], bool(each["passages"])))) and not each["test"]:
            rows["targets"][number] = [*(label[0] >= limit for limit in MASTERY_TAUS), label[1] >= tau]
    np.savez_compressed(file, **rows)
    taught, with_passages = rows["folds"] >= 0, np.array([bool(each["passages"]) for each in prompts])
    taught &= ~np.isnan(rows["targets"]).all(axis=1)
    facts = {
        "certainty_tau": tau,
        "samples": int(SAMPLES),
        "train": int(taught.sum()),
        "train_with_passages": int((taught & with_passages).sum()),
        "positives": np.nanmean(rows["targets"][taught], 0).round(4).tolist(),
    }
    (plan.work / "rows" / f"{ROWS}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(facts), flush=True)


def read_prompts(plan: SamplesPlan) -> list[dict[str, Any]]:
    """Read which question and side each prompt belongs to."""
    with gzip.open(plan.work / "rows" / f"{ROWS}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def copy_results(plan: SamplesPlan) -> None:
    """Copy labels, needs and manifests to WORK/out."""
    out = plan.work / "out"
    with gzip.GzipFile(out / "kbm30_labels.jsonl.gz", "wb", mtime=0) as lines:
        for (name, key, has_passages), (mastery, certainty) in sorted(read_labels(plan).items()):
            record = {"set": name, "id": key, "passages": has_passages, "mastery": round(mastery, 4),
                      "certainty": round(certainty, 4)}  # fmt: skip
            lines.write((json.dumps(record) + "\n").encode())
    for name in plan.sets("test"):
        if (file := plan.work / f"{name}-test" / "needs.jsonl").is_file():
            shutil.copyfile(file, out / f"{name}.needs.jsonl")
    runs = {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in plan.work.glob("*/run.json")}
    (out / "runs.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run the steps, or prepare their data."""
    parser = create_parser(__doc__)
    parser.add_argument("--prepare", action="store_true", help="write WORK/data and WORK/rows")
    parser.add_argument("--tokenizer", help="folder of the judge's tokenizer, for --prepare")
    parser.add_argument("--indexes", type=Path, help="folder of the indexes of `benchmarks.papers`, for --prepare")
    parser.add_argument("--most", type=int, default=100_000, help="maximum number of questions, for rehearsals")
    options = parser.parse_args()
    plan = SamplesPlan(options.model, options.bench, options.work)
    if options.prepare:
        prepare(plan, options.tokenizer, options.indexes, options.most)
        return
    os.environ["KNOWGATE_BENCH"] = plan.path("data")
    (plan.work / "out").mkdir(parents=True, exist_ok=True)
    only = options.only
    seconds = run_steps(plan.steps(), plan.work / "out", only, print_only=options.print)
    if not options.print and (only is None or "targets" in only):
        add_targets(plan)
    if not options.print and (only is None or "keep" in only):
        copy_results(plan)
    print(f"{seconds:.0f} s in total; results: {plan.work / 'out'}")


if __name__ == "__main__":
    main()
