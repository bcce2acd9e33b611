"""What labelling costs beside the LLM: CPU time per question with a model that costs nothing to speak of.

    python benchmarks/outside.py [--questions 1000] [--samples 0] [--passages 20000]

Looking up, counting answers in the corpus, prompts, grading and writing, on a made-up corpus with an index. The fake
model's own time is taken off. CPU time, so that other work on the machine counts for little. Aim: 2 ms per question.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from knowgate.labels.labeling import label
from knowgate.models.fake import FakeModel
from knowgate.retrieval import load_retriever
from knowgate.retrieval.index import build_index
from knowgate.types import Question

WORDS = 20_000  # of the made-up language, the k-th of them as frequent as 1 / k
LENGTH = 60


class Timed(FakeModel):
    """The fake model, and how long it took."""

    spent = 0.0

    def read(self, *given: Any) -> Any:
        start = time.thread_time()
        try:
            return super().read(*given)
        finally:
            self.spent += time.thread_time() - start


def words(dice: random.Random, n: int) -> list[str]:
    ranks = [int(WORDS ** dice.random()) for _ in range(n)]
    return [f"{'bcdfglmnprst'[rank % 12]}{'aeiou'[rank % 5]}{rank:x}n" for rank in ranks]


def corpus(dice: random.Random, folder: Path, passages: int) -> list[list[str]]:
    texts = [words(dice, LENGTH) for _ in range(passages)]
    lines = (f'{{"id": "{i}", "text": "{" ".join(text)}"}}\n' for i, text in enumerate(texts))
    (folder / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    build_index(folder / "corpus.jsonl", folder / "index")
    return texts


def questions(dice: random.Random, texts: list[list[str]], n: int) -> list[Question]:
    """About a passage each; the gold answers are words of it, with a few other spellings."""
    chosen = [dice.choice(texts) for _ in range(n)]
    return [
        Question(f"Where is {' '.join(text[:8])}?", id=str(i), answers=(" ".join(text[8:10]), text[9], *text[20:26]))
        for i, text in enumerate(chosen)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--passages", type=int, default=20_000)
    options = parser.parse_args()
    dice, model = random.Random(0), Timed()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = questions(dice, corpus(dice, folder, options.passages), options.questions)
        index = load_retriever(str(folder / "index"))
        index.search(["warm up"], 1)
        start = time.process_time()
        label(asked, model=model, out=folder / "run", index=index, samples=options.samples)
        outside = time.process_time() - start - model.spent
    each = 1000 / options.questions
    print(f"outside the LLM {outside * each:.2f} ms of CPU per question (aim <= 2); the fake LLM itself "
          f"{model.spent * each:.2f} ms, {options.samples} samples, {options.passages:,} passages")  # fmt: skip


if __name__ == "__main__":
    main()
