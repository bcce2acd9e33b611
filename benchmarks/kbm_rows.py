"""Prepare the rows that KBM's judge learns from: recorded label runs, each question with and without passages.

    python -m benchmarks.kbm_rows --tokenizer FOLDER --indexes FOLDER --out FOLDER

Needs KNOWGATE_BENCH, and the indexes idx-nq, idx-triviaqa, idx-squad, idx-hotpotqa, idx-zh and idx-pooled, which
`benchmarks.papers --only index` builds. Three targets: mastery of at least .8 and of .5, and certainty of at least tau.
Answers with passages were given once, greedily, so mastery with passages is 1 or 0, and their certainty is unknown (NaN).
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers import SETS
from benchmarks.policy_rows import Sequences
from benchmarks.tables.common import QWEN, RUNS
from knowgate.gates.kbm import MASTERY_START
from knowgate.models.prompts.questions import build_kbm_prompt
from knowgate.types import Passage, Question

MASTERY_TAUS = (0.8, 0.5)
CERTAINTY_GRID = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
MIN_CERTAIN_SHARE = 0.2  # of the train questions, so that a judge can learn to say certain for more than a tenth
MAX_TOKENS = 300  # of passages in a prompt; those that do not fit are dropped, the last one first
K = 3
EVERY = 2  # each how many train questions one is also taught with passages


@dataclass(frozen=True)
class KbmRow:
    """One prompt of the judge: question, passages (none for the question alone), labels, and whether it is a test row."""

    set_name: str
    row: Any
    question: Question
    passages: Sequence[Passage]
    is_test: bool


def read_rows(indexes: Path) -> Iterator[KbmRow]:
    """Yield the recorded questions, each without passages and (all test rows, some train rows) with them."""
    from knowgate.data.questions import load_questions
    from knowgate.data.runs.folder import RunFolder
    from knowgate.retrieval import load_retriever

    for name, data in SETS.items():
        retriever = load_retriever(str(indexes / f"idx-{data.corpus}")) if data.corpus not in ("", "own") else None
        for split in ("train", "test"):
            folder = RUNS / QWEN / f"{name}-{split}"
            if not folder.is_dir():
                continue
            check_index(folder, retriever)
            questions = {question.id: question for question in load_questions(f"bench:{name}/{split}")}
            for number, row in enumerate(RunFolder(folder).rows()):
                question = questions[row.id]
                yield KbmRow(name, row, question, (), split == "test")
                if row.open is None or (split == "train" and number % EVERY):
                    continue
                passages = question.contexts or () if retriever is None else retriever.search([question.text], K)[0]
                if passages:
                    yield KbmRow(name, row, question, tuple(passages), split == "test")


def check_index(folder: Path, retriever: Any) -> None:
    """Raise if the index is not the one that the recorded answers were given with."""
    if not is_recorded_index(folder, retriever):
        raise SystemExit(f"{folder.name}: the index differs from the recorded one. Build it with benchmarks.papers.")


def is_recorded_index(folder: Path, retriever: Any) -> bool:
    """Return whether the recorded answers were given with this index, or with none."""
    recorded = json.loads((folder / "run.json").read_text(encoding="utf-8"))["settings"].get("retriever_fingerprint")
    return retriever is None or not recorded or bool(retriever.fingerprint == recorded)


def choose_certainty_tau(rows: Sequence[KbmRow]) -> float:
    """Return the largest tau that enough train questions reach."""
    values = np.array([each.row.closed.certainty for each in rows if not each.is_test and not each.passages])
    return next((tau for tau in CERTAINTY_GRID if (values >= tau).mean() >= MIN_CERTAIN_SHARE), CERTAINTY_GRID[-1])


def make_targets(each: KbmRow, tau: float) -> list[float]:
    """Return the labels: mastery of at least .8, of at least .5, and certainty of at least tau."""
    if each.passages:
        return [float(bool(each.row.open.correct))] * len(MASTERY_TAUS) + [float("nan")]
    closed = each.row.closed
    return [*(float(closed.mastery >= limit) for limit in MASTERY_TAUS), float(closed.certainty >= tau)]


def encode(tokenizer: Any, each: KbmRow) -> list[int]:
    """Tokenize the prompt up to where the judge names its mastery, with as many passages as fit."""

    def tokenize(passages: Sequence[Passage]) -> list[int]:
        turn = [{"role": "user", "content": build_kbm_prompt(each.question, passages)}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return list(tokenizer.encode(text + MASTERY_START, add_special_tokens=False))

    bare, passages = tokenize(()), list(each.passages)
    while True:
        ids = tokenize(passages) if passages else bare
        if len(ids) <= len(bare) + MAX_TOKENS:
            return ids
        last = passages.pop()
        if not passages and len(last.text) > 1:
            passages = [Passage(last.id, last.text[: len(last.text) // 2], last.title)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--indexes", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="rows, for rehearsals")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    rows = [each for each in read_rows(options.indexes) if each.passages or each.row.closed.mastery is not None]
    tau = choose_certainty_tau(rows)
    if options.limit:
        rows = [rows[k] for k in np.random.default_rng(0).permutation(len(rows))[: options.limit]]
    ids = [encode(tokenizer, each) for each in rows]
    sequences = Sequences(
        ids,
        [[len(each) - 1] for each in ids],
        [make_targets(each, tau) for each in rows],
        [-1 if each.is_test else 0 for each in rows],
    )
    options.out.mkdir(parents=True, exist_ok=True)
    sequences.save(options.out / "kbm_rows.npz")
    with gzip.open(options.out / "kbm_rows.jsonl.gz", "wt", encoding="utf-8") as file:
        for each in rows:
            record = {"set": each.set_name, "id": each.row.id, "passages": len(each.passages), "test": each.is_test}
            file.write(json.dumps(record) + "\n")
    facts = {
        "certainty_tau": tau,
        "train": sum(not each.is_test for each in rows),
        "train_with_passages": sum(not each.is_test and bool(each.passages) for each in rows),
        "train_tokens": sum(len(row) for row, each in zip(ids, rows, strict=True) if not each.is_test),
        "test_tokens": sum(len(row) for row, each in zip(ids, rows, strict=True) if each.is_test),
        "positives": np.nanmean([t for t, e in zip(sequences.targets, rows, strict=True) if not e.is_test], 0).tolist(),
    }
    (options.out / "kbm_rows.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
