"""How many questions the embedded LLM answers right from the packaged handbook (first answers of a newcomer).

    python -m benchmarks.handbook [--model smollm] [--whole-passages] [--json]     minutes on a CPU

The 60 questions are in `first_hour/handbook.jsonl`. Thirty (`development`) were used to choose what the LLM is shown: how
many sentences of the passages, selected how. Thirty (`blind`) were written after that was frozen, from handbook pages that
no development question uses. Since then one condition was added, for questions about other things: nothing is quoted from
a passage that has no more than half of the question's words. It changed no answer of either half.

Every question is retrieved for, with three passages, as `knowgate ask` does. An answer is right if it contains a gold
answer and no number that is neither in the passages nor in the question. The share that counts is that among questions
whose best passage is from the right page.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import knowgate.cli.demo
from knowgate.models import load_model
from knowgate.models.prompts.answers import load_answer_prompts
from knowgate.retrieval import load_retriever
from knowgate.retrieval.index import build_index
from knowgate.types import Question

ROWS = Path(__file__).parent / "first_hour" / "handbook.jsonl"
HANDBOOK = Path(knowgate.cli.demo.__file__).parent / "data" / "handbook"
PASSAGES, MAX_TOKENS, BATCH = 3, 32, 6
NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")


def is_right(answer: str, row: dict[str, Any], context: str) -> bool:
    """Return whether an answer contains a gold answer and no invented number."""
    known = find_numbers(f"{context} {row['question']}")
    has_gold = any(gold.lower() in answer.lower() for gold in row["answers"])
    return has_gold and find_numbers(answer) <= known


def find_numbers(text: str) -> set[str]:
    """Return the numbers of a text, without thousands separators."""
    return {number.replace(",", "") for number in NUMBER.findall(text)}


def measure(spec: str, *, whole_passages: bool) -> list[dict[str, Any]]:
    """Answer every question with passages and grade the answer."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    model = load_model(spec)
    prompts = load_answer_prompts(model=model)
    if whole_passages:
        prompts = replace(prompts, max_sentences=None)
    with tempfile.TemporaryDirectory() as folder:
        build_index(HANDBOOK, folder, kind="bm25")
        results = load_retriever(folder).search([row["question"] for row in rows], PASSAGES)
    open_book = [prompts.open(Question(row["question"]), passages) for row, passages in zip(rows, results, strict=True)]
    answers: list[str] = []
    for start in range(0, len(rows), BATCH):
        batch = model.generate(open_book[start : start + BATCH], max_tokens=MAX_TOKENS)
        answers += [completions[0].text for completions in batch]
    for row, passages, answer in zip(rows, results, answers, strict=True):
        row["on_top"] = passages[0].id.partition("#")[0] == row["page"]
        row["generated"] = answer
        row["answer"] = prompts.check_open_answer(Question(row["question"]), passages, answer)
        row["right"] = is_right(row["answer"], row, " ".join(passage.text for passage in passages))
    return rows


def main() -> None:
    """Print the share of right answers, by set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm")
    parser.add_argument("--whole-passages", action="store_true", help="Show whole passages, not the best sentences.")
    parser.add_argument("--json", action="store_true", help="Print every row as JSON.")
    options = parser.parse_args()
    rows = measure(options.model, whole_passages=options.whole_passages)
    if options.json:
        print("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
        return
    for name in dict.fromkeys(row["set"] for row in rows):
        chosen = [row for row in rows if row["set"] == name]
        on_top = [row for row in chosen if row["on_top"]]
        right = sum(row["right"] for row in on_top)
        print(
            f"{name}: right passage on top for {len(on_top)} of {len(chosen)} questions; of these, "
            f"{right} answered right ({right / len(on_top):.0%}); {sum(row['right'] for row in chosen)} right in all; "
            f"{sum(row['answer'] != row['generated'] for row in chosen)} answers are quotations"
        )
    for row in rows:
        if not row["right"]:
            print(f"  {row['set']}: {row['question']} -> {row['answer']!r}, not {row['answers'][0]!r}")


if __name__ == "__main__":
    main()
