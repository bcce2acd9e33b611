"""Measure the CPU time of labeling per question without the LLM.

    python benchmarks/outside.py [--questions 1000] [--samples 0] [--passages 20000]

Labels questions about a generated corpus with the fake model, and subtracts the time of the fake model. The rest is
search, counting answers in the corpus, prompts, grading and writing. CPU time depends little on other work on the machine.
The target is at most 2 ms per question.
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

VOCABULARY = 20_000  # number of generated words; the k-th is drawn with a probability proportional to 1 / k
PASSAGE_WORDS = 60


class TimedFakeModel(FakeModel):
    """Fake model that measures its own CPU time.

    Attributes:
        cpu_seconds: CPU seconds of all calls of `read`.
    """

    cpu_seconds = 0.0

    def read(self, *args: Any) -> Any:
        """Read prompts as the fake model does, and add up the CPU time."""
        start = time.thread_time()
        try:
            return super().read(*args)
        finally:
            self.cpu_seconds += time.thread_time() - start


def draw_words(rng: random.Random, n: int) -> list[str]:
    """Draw words of a generated vocabulary."""
    ranks = [int(VOCABULARY ** rng.random()) for _ in range(n)]
    return [f"{'bcdfglmnprst'[rank % 12]}{'aeiou'[rank % 5]}{rank:x}n" for rank in ranks]


def write_corpus(rng: random.Random, folder: Path, passages: int) -> list[list[str]]:
    """Write a corpus and its index, and return the words of each passage."""
    texts = [draw_words(rng, PASSAGE_WORDS) for _ in range(passages)]
    lines = (f'{{"id": "{i}", "text": "{" ".join(text)}"}}\n' for i, text in enumerate(texts))
    (folder / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    build_index(folder / "corpus.jsonl", folder / "index")
    return texts


def make_questions(rng: random.Random, texts: list[list[str]], n: int) -> list[Question]:
    """Return questions about random passages, whose gold answers are words of the passage."""
    chosen = [rng.choice(texts) for _ in range(n)]
    return [
        Question(f"Where is {' '.join(text[:8])}?", id=str(i), answers=(" ".join(text[8:10]), text[9], *text[20:26]))
        for i, text in enumerate(chosen)
    ]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=1000, help="number of questions")
    parser.add_argument("--samples", type=int, default=0, help="sampled answers per question")
    parser.add_argument("--passages", type=int, default=20_000, help="number of passages in the corpus")
    options = parser.parse_args()
    rng, model = random.Random(0), TimedFakeModel()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        questions = make_questions(rng, write_corpus(rng, folder, options.passages), options.questions)
        index = load_retriever(str(folder / "index"))
        index.search(["warm up"], 1)
        start = time.process_time()
        label(questions, model=model, out=folder / "run", index=index, samples=options.samples)
        outside = time.process_time() - start - model.cpu_seconds
    per_question = 1000 / options.questions
    print(
        f"CPU time per question: {outside * per_question:.2f} ms outside the LLM (target <= 2), "
        f"{model.cpu_seconds * per_question:.2f} ms in the fake LLM; "
        f"{options.samples} samples, {options.passages:,} passages"
    )


if __name__ == "__main__":
    main()
