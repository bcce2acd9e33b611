"""Questions labelled per second, against two plain ways to draw the same samples, in one process.

    python benchmarks/labelling.py [--questions 4] [--samples 30]

(a) a loop of single transformers `generate` calls, (b) one `generate(num_return_sequences=N)` per prompt.
All draw N answers of 12 tokens, closed- and open-book, from the untruncated distribution of the embedded model. End
tokens are switched off in all three, so that everybody generates the same number of tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

PASSAGE = (
    "The Golden Gate Bridge is a suspension bridge spanning the Golden Gate, the strait connecting San Francisco Bay "
    "and the Pacific Ocean. The structure links San Francisco to Marin County, carrying both U.S. Route 101 and "
    "California State Route 1 across the strait. It was designed by the engineer Joseph Strauss in 1917."
)
TOPICS = ["bridge", "strait", "engineer", "county", "ocean", "route", "bay", "structure"]
TOKENS = 12


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def endless(model: Any) -> Any:
    """The same model with no token that ends an answer."""
    from knowgate.models.hf.model import HFModel

    twin = HFModel(model.source, model.label)
    twin.__dict__.update(loaded=model.loaded, stop=frozenset(), prefixes=model.prefixes)
    return twin


def library_calls(model: Any, prompts: list[Any], samples: int, at_once: int) -> None:
    """transformers' own generate: `samples` answers per prompt, `at_once` of them per call."""
    import torch

    for prompt in prompts:
        ids = torch.tensor([model.tokenise(model.render(prompt.text))])
        for _ in range(samples // at_once):
            with torch.inference_mode():
                model.loaded.model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                    max_new_tokens=TOKENS, min_new_tokens=TOKENS, num_return_sequences=at_once, pad_token_id=model.pad,
                )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--samples", type=int, default=30)
    options = parser.parse_args()
    from knowgate.labels.grading import StringGrader
    from knowgate.labels.labeller import Labeller, Plan
    from knowgate.models import load_model
    from knowgate.prompts.answer import AnswerPrompts
    from knowgate.types import Passage, Question

    model = endless(load_model("smollm"))
    questions = [
        Question(f"Who designed the {TOPICS[i % 8]} number {i}?", id=str(i), answers=("Joseph Strauss",),
                 contexts=(Passage("p", PASSAGE),))
        for i in range(options.questions)
    ]  # fmt: skip
    prompts = AnswerPrompts()
    asked = [prompts.closed(q) for q in questions] + [prompts.open(q, q.contexts) for q in questions]
    plan = Plan(samples=options.samples, max_tokens=TOKENS, layers=(15,))
    labeller = Labeller(model, StringGrader(), plan)
    labeller.label(questions[:1])  # warm up
    ours = seconds(lambda: labeller.label(questions))
    loop = seconds(lambda: library_calls(model, asked[:1] + asked[-1:], options.samples, 1)) * options.questions
    at_once = seconds(lambda: library_calls(model, asked, options.samples, options.samples))
    n = options.questions
    print(f"knowgate label: {n / ours:.3f} questions/s (grading, hidden states and self-assessment included)")
    print(
        f"(a) loop of single generate calls (timed on one): {n / loop:.3f} questions/s: {loop / ours:.1f} x (aim >= 6)"
    )
    print(f"(b) generate(num_return_sequences={options.samples}): {n / at_once:.3f} questions/s: "
          f"{at_once / ours:.1f} x (aim >= 2)")  # fmt: skip


if __name__ == "__main__":
    main()
