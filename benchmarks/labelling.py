"""Questions labelled per second, against plain ways to draw the same samples, in one process.

    python benchmarks/labelling.py [--model smollm] [--questions 4] [--samples 30] [--ours]

(a) a loop of single transformers `generate` calls, (b) one `generate(num_return_sequences=N)` per prompt, (c) knowgate
with a copy of the prompt's keys and values for every answer, as it was; --ours leaves out (a) and (b). All draw N
answers of 12 tokens, closed- and open-book, from the untruncated distribution of the model. End tokens are switched
off, so that everybody generates the same number of tokens.

Whole runs, with search, grading and writing, are measured by `label_speed.py`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

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


def measured(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and those of processor time, which other work on the machine does not lengthen."""
    start, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - used


def made_up(n: int, passages: int) -> list[Any]:
    from knowgate.types import Passage, Question

    return [
        Question(f"Who designed the {TOPICS[i % 8]} number {i}?", id=str(i), answers=("Joseph Strauss",),
                 contexts=tuple(Passage(f"p{j}", f"{j}. {PASSAGE}") for j in range(passages)))
        for i in range(n)
    ]  # fmt: skip


def twin(model: Any, **changed: Any) -> Any:
    """The same weights; `changed` replaces cached properties, such as `stop_ids` or `shares_prompt_cache`."""
    from knowgate.models.hf.model import HFModel

    other = HFModel(model.source, model.label)
    other.__dict__.update(loaded=model.loaded, prefix_cache=model.prefix_cache, **changed)
    return other


def library_calls(model: Any, prompts: list[Any], samples: int, at_once: int) -> None:
    """transformers' own generate: `samples` answers per prompt, `at_once` of them per call."""
    import torch

    for prompt in prompts:
        ids = torch.tensor([model.tokenize(model.render(prompt.text))], device=model.loaded.device)
        for _ in range(samples // at_once):
            with torch.inference_mode():
                model.loaded.model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                    max_new_tokens=TOKENS, min_new_tokens=TOKENS, num_return_sequences=at_once,
                    pad_token_id=model.pad_id,
                )  # fmt: skip


def against_others(loaded: Any, options: argparse.Namespace) -> None:
    from knowgate.labels.grading import StringGrader
    from knowgate.labels.labeler import Labeler
    from knowgate.labels.options import LabelPlan
    from knowgate.models.prompts.answers import AnswerPrompts

    n, questions, prompts = options.questions, made_up(options.questions, 1), AnswerPrompts()
    plan = LabelPlan(samples=options.samples, max_tokens=TOKENS, layers=(min(15, loaded.depth - 1),))
    model = twin(loaded, stop_ids=frozenset())
    now = Labeler(model, StringGrader(), plan)
    before = Labeler(twin(loaded, stop_ids=frozenset(), shares_prompt_cache=False), StringGrader(), plan)
    now.label(questions[:1])  # warms up
    pairs = [(measured(lambda: now.label(questions)), measured(lambda: before.label(questions))) for _ in range(2)]
    ours, copies = (np.min(times, axis=0) for times in zip(*pairs, strict=True))
    wall, used = copies / ours
    print(f"knowgate label: {n / ours[0]:.3f} questions/s (grading, hidden states and self-assessment included)")
    print(f"(c) a copy of the prompt for every answer: {n / copies[0]:.3f} questions/s: {wall:.2f} x, "
          f"by processor time {used:.2f} x (aim >= 1.5)")  # fmt: skip
    if options.ours:
        return
    asked = [prompts.closed(q) for q in questions] + [prompts.open(q, q.contexts) for q in questions]
    loop = seconds(lambda: library_calls(model, asked[:1] + asked[-1:], options.samples, 1)) * n
    at_once = seconds(lambda: library_calls(model, asked, options.samples, options.samples))
    print(
        f"(a) loop of single generate calls (timed on one): {n / loop:.3f} questions/s: "
        f"{loop / ours[0]:.1f} x (aim >= 6)"
    )
    print(f"(b) generate(num_return_sequences={options.samples}): {n / at_once:.3f} questions/s: "
          f"{at_once / ours[0]:.1f} x (aim >= 2)")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="a GPU where there is one, unless said otherwise")
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--ours", action="store_true", help="leave out transformers' own generate")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from knowgate.models import load_model

    model: Any = load_model(options.model)
    if options.device and model.loaded.device.type != options.device:
        parser.error(f"there is no {options.device} here.")
    against_others(model, options)


if __name__ == "__main__":
    main()
