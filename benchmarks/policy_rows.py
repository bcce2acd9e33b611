"""Prepare the rows that `policy_training.py` trains judges on: token ids, label positions, targets and folds.

    python -m benchmarks.policy_rows --bench DATA --tokenizer FOLDER --out FOLDER [--closed-book | --pooled]

The files hold token ids and numbers only, so that the machine with the GPU needs neither the data nor knowgate.
One sequence holds everything that a judge may read about a row, with a label position after each part: after the
question, after the closed-book answer and after the open-book answer. Attention is causal, so the prediction at a
position depends on the parts before it alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks.policy_sets import RECORDED_SETS, RecordedRow, assign_question_folds, read_recorded
from knowgate.data.splits import fingerprint_text_loosely
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Question

ANSWER_TOKENS = 110  # of each answer; 95 % are shorter
FOLDS = 4
TEST_FOLD, UNUSED_FOLD = -1, -2  # train rows of UNUSED_FOLD are scored like test rows, but never learned from
HELD_OUT_PARTS = 10  # one part of ten of the closed-book train rows is left out by the adapters, for their stack
CLOSED_BOOK = {
    "triviaqa": (("triviaqa/train", "triviaqa_ctx/train"), "triviaqa_ctx/test", 1500),
    "nq": (("nq_open/train", "nq_ctx/train"), "nq_ctx/test", None),
}
TEST_SETS = ("triviaqa_ctx/test", "nq_ctx/test")


@dataclass
class Sequences:
    """Token sequences of different lengths, with label positions and targets (NaN: no target)."""

    ids: list[list[int]]
    positions: list[list[int]]
    targets: list[list[float]]
    folds: list[int]  # TEST_FOLD for test rows

    def save(self, file: Path | BinaryIO) -> None:
        lengths = np.array([len(ids) for ids in self.ids], np.int32)
        flat = np.concatenate([np.array(ids, np.int32) for ids in self.ids])
        np.savez_compressed(
            file,
            flat=flat,
            lengths=lengths,
            positions=np.array(self.positions, np.int32),
            targets=np.array(self.targets, np.float32),
            folds=np.array(self.folds, np.int8),
        )


def encode_recorded(
    tokenizer: Any, rows: Sequence[RecordedRow], llm: str = "", unused: Collection[str] = ()
) -> Sequences:
    """Encode rows with both answers; three label positions, two targets (closed-book right, open-book right).

    Args:
        tokenizer: Tokenizer of the base model.
        rows: The rows.
        llm: Name of the LLM, which is put in front of each row; empty for none.
        unused: Fingerprints of questions whose train rows are not learned from.
    """

    def tokens(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    start = tokens(f"LLM: {llm}\n") if llm else []
    folds = assign_question_folds([row.question for row in rows], FOLDS)
    result = Sequences([], [], [], [])
    for row, fold in zip(rows, folds, strict=True):
        ids = start + tokens(f"Question: {row.question}\nDoes the LLM know the answer:")
        positions = [len(ids) - 1]
        for name, text in (("memory", row.closed), ("documents", row.open)):
            answer = tokens(text.strip() or "(no answer)")[:ANSWER_TOKENS]
            ids += [*tokens(f"\nAnswer from {name}: "), *answer, *tokens("\nIs this correct:")]
            positions.append(len(ids) - 1)
        result.ids.append(ids)
        result.positions.append(positions)
        result.targets.append([float(row.closed_book_right), float(row.open_book_right)])
        is_unused = fingerprint_text_loosely(row.question) in unused
        train_fold = UNUSED_FOLD if is_unused else fold
        result.folds.append(train_fold if row.split == "train" else TEST_FOLD)
    return result


def write_recorded(bench: Path, tokenizer: Any, out: Path, *, only_pooled: bool) -> None:
    """Write the rows of each recorded set, and those with the name of the LLM in front for the pooled judge.

    The pooled judge learns from all sets, so no train row may have a question that is a test question of any set.
    """
    recorded = {name: read_recorded(bench, name) for name in RECORDED_SETS}
    in_test = {
        fingerprint_text_loosely(row.question) for rows in recorded.values() for row in rows if row.split == "test"
    }
    for name, rows in recorded.items():
        if not only_pooled:
            encode_recorded(tokenizer, rows).save(out / f"{name}.npz")
        encode_recorded(tokenizer, rows, RECORDED_SETS[name].llm, in_test).save(out / f"{name}.named.npz")


def read_lines(file: Path) -> Iterable[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def closed_book_rows(bench: Path) -> list[dict[str, Any]]:
    """Return the train rows whose questions occur in no test set, and the test rows, each question once."""
    in_test = {
        fingerprint_text_loosely(row["question"])
        for name in TEST_SETS
        for row in read_lines(bench / f"{name}.jsonl.gz")
    }
    seen, rows = set[str](), []
    for group, (trains, test, limit) in CLOSED_BOOK.items():
        for name in (*trains, test):
            is_test = name == test
            for number, row in enumerate(read_lines(bench / f"{name}.jsonl.gz")):
                key = fingerprint_text_loosely(row["question"])
                if key in seen or (is_test and limit and number >= limit) or (not is_test and key in in_test):
                    continue
                seen.add(key)
                rows.append({**row, "group": group, "source": name, "is_test": is_test})
    return rows


def write_closed_book(bench: Path, tokenizer: Any, out: Path) -> None:
    """Write the closed-book prompts of the LLM itself, and what its answers are graded with."""
    rows, prompts = closed_book_rows(bench), AnswerPrompts()
    ids = []
    for row in rows:
        text = prompts.closed(Question(row["question"], lang="en")).text
        turn = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        ids.append(tokenizer.encode(encoded, add_special_tokens=False))
    questions = [row["question"] for row in rows]
    folds = assign_question_folds(questions, FOLDS)
    np.savez_compressed(
        out / "closed_book.npz",
        flat=np.concatenate([np.array(each, np.int32) for each in ids]),
        lengths=np.array([len(each) for each in ids], np.int32),
        folds=np.array([-1 if row["is_test"] else fold for row, fold in zip(rows, folds, strict=True)], np.int8),
        group=np.array([list(CLOSED_BOOK).index(row["group"]) for row in rows], np.int8),
        held_out=np.array(assign_question_folds(questions, HELD_OUT_PARTS)) == HELD_OUT_PARTS - 1,
    )
    with gzip.open(out / "closed_book.jsonl.gz", "wt", encoding="utf-8") as file:
        for row in rows:
            kept = {key: row[key] for key in ("id", "question", "answers", "source")}
            file.write(json.dumps(kept, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--closed-book", action="store_true", help="only the closed-book questions")
    parts.add_argument("--pooled", action="store_true", help="only the rows of the pooled judge")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.closed_book:
        write_recorded(options.bench, tokenizer, options.out, only_pooled=options.pooled)
    if not options.pooled:
        write_closed_book(options.bench, tokenizer, options.out)


if __name__ == "__main__":
    main()
