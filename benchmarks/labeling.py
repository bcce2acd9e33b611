"""Measure labeled questions per second, compared with simpler ways to draw the same samples.

    python benchmarks/labeling.py [--model smollm] [--questions 4] [--samples 30] [--ours]

Baselines: (a) a loop of single `generate` calls of transformers, (b) one `generate(num_return_sequences=N)` per prompt,
(c) knowgate with one copy of the prompt's keys and values per answer, as in earlier versions. --ours skips (a) and (b).
All draw N answers of 12 tokens, closed-book and open-book, from the untruncated distribution of the model. End tokens
are disabled, so that all generate the same number of tokens.

`label_speed.py` measures complete runs, with search, grading and writing.
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


def measure_seconds(work: Callable[[], Any]) -> float:
    """Return the wall time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_both_times(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the wall time and the CPU time of a call. Other processes affect CPU time less."""
    start, cpu_start = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - cpu_start


def generate_questions(n: int, passages: int) -> list[Any]:
    """Return questions with passages that differ in a few words."""
    from knowgate.types import Passage, Question

    return [
        Question(f"Who designed the {TOPICS[i % 8]} number {i}?", id=str(i), answers=("Joseph Strauss",),
                 contexts=tuple(Passage(f"p{j}", f"{j}. {PASSAGE}") for j in range(passages)))
        for i in range(n)
    ]  # fmt: skip


def copy_model(model: Any, **changes: Any) -> Any:
    """Return a model with the same weights and changed cached properties, such as `stop_ids`."""
    from knowgate.models.hf.model import HFModel

    copy = HFModel(model.source, model.label)
    copy.__dict__.update(loaded=model.loaded, prefix_cache=model.prefix_cache, **changes)
    return copy


def generate_with_transformers(model: Any, prompts: list[Any], samples: int, per_call: int) -> None:
    """Draw `samples` answers per prompt with `generate` of transformers, `per_call` answers in each call."""
    import torch

    for prompt in prompts:
        ids = torch.tensor([model.tokenize(model.render(prompt.text))], device=model.loaded.device)
        for _ in range(samples // per_call):
            with torch.inference_mode():
                model.loaded.model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                    max_new_tokens=TOKENS, min_new_tokens=TOKENS, num_return_sequences=per_call,
                    pad_token_id=model.pad_id,
                )  # fmt: skip


def compare_speed(loaded: Any, options: argparse.Namespace) -> None:
    """Print the speed of knowgate and its ratio to every baseline."""
    from knowgate.labels.grading import StringGrader
    from knowgate.labels.labeler import Labeler
    from knowgate.labels.options import LabelOptions
    from knowgate.models.prompts.answers import AnswerPrompts

    n, questions, prompts = options.questions, generate_questions(options.questions, 1), AnswerPrompts()
    plan = LabelOptions(samples=options.samples, max_tokens=TOKENS, layers=(min(15, loaded.depth - 1),))
    model = copy_model(loaded, stop_ids=frozenset())
    labeler = Labeler(model, StringGrader(), plan)
    copying = Labeler(copy_model(loaded, stop_ids=frozenset(), shares_prompt_cache=False), StringGrader(), plan)
    labeler.label(questions[:1])  # warm up
    pairs = [
        (measure_both_times(lambda: labeler.label(questions)), measure_both_times(lambda: copying.label(questions)))
        for _ in range(2)
    ]
    ours, copies = (np.min(times, axis=0) for times in zip(*pairs, strict=True))
    wall_ratio, cpu_ratio = copies / ours
    print(f"knowgate label: {n / ours[0]:.3f} questions/s (grading, hidden states and self-assessment included)")
    print(f"(c) a copy of the prompt for every answer: {n / copies[0]:.3f} questions/s: {wall_ratio:.2f} x, "
          f"by CPU time {cpu_ratio:.2f} x (target >= 1.5)")  # fmt: skip
    if options.ours:
        return
    all_prompts = [prompts.closed(question) for question in questions]
    all_prompts += [prompts.open(question, question.contexts) for question in questions]
    loop = (
        measure_seconds(
            lambda: generate_with_transformers(model, all_prompts[:1] + all_prompts[-1:], options.samples, 1)
        )
        * n
    )
    single_call = measure_seconds(
        lambda: generate_with_transformers(model, all_prompts, options.samples, options.samples)
    )
    print(
        f"(a) loop of single generate calls (timed on one question): {n / loop:.3f} questions/s: "
        f"{loop / ours[0]:.1f} x (target >= 6)"
    )
    print(f"(b) generate(num_return_sequences={options.samples}): {n / single_call:.3f} questions/s: "
          f"{single_call / ours[0]:.1f} x (target >= 2)")  # fmt: skip


def main() -> None:
    """Read the options and compare the speeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm", help="model spec")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    parser.add_argument("--questions", type=int, default=4, help="number of questions")
    parser.add_argument("--samples", type=int, default=30, help="samples per prompt")
    parser.add_argument("--ours", action="store_true", help="skip the baselines (a) and (b)")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from knowgate.models import load_model

    model: Any = load_model(options.model)
    if options.device and model.loaded.device.type != options.device:
        parser.error(f"device {options.device} is not available. Use another --device.")
    compare_speed(model, options)


if __name__ == "__main__":
    main()
