"""Compare llama.cpp (in-process) with transformers on the weights of the embedded model, in CPU time.

    python benchmarks/llamacpp.py [--questions 8] [--file OTHER.gguf]

Both alternate, so that other load affects both alike. Prints the seconds of each and their ratio, for labeling (a
draft, 5 samples, hidden states) and for asking (one question at a time). Threads of llama.cpp wait for each other in a
busy loop, which counts as CPU time: set OMP_NUM_THREADS to at most the number of idle cores.

With --agreement, prints how the needs of two gates correlate (target: r >= .98). With --decisions DATA, prints how often
the packaged gate, which reads hidden states before and after the draft, decides the same with both (target: 99 %).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from knowgate.data.questions import load_questions
from knowgate.gates import PACKAGED_GATES, load_gate
from knowgate.gates.scoring import bind_gate, read_questions, score_with_raw
from knowgate.models import load_model
from knowgate.models.gguf import find_gguf_file
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Model, Prompt, Question, SignalRequest

COUNTRIES = [
    "France",
    "Peru",
    "Japan",
    "Kenya",
    "Norway",
    "Chile",
    "Egypt",
    "Nepal",
    "Ghana",
    "Cuba",
    "Laos",
    "Malta",
    "Oman",
    "Fiji",
    "Togo",
    "Iran",
]
FORMS = ["What is the capital of {}?", "Who was the first ruler of {}?", "In which year did {} last go to war?"]
ROUNDS = 3
GROUP = 20  # questions per batch


def main() -> None:
    """Read the options and run one comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=8, help="number of questions")
    parser.add_argument("--file", default=str(find_gguf_file("smollm")), help="GGUF file for llama.cpp")
    parser.add_argument("--agreement", action="store_true", help="compare needs instead of times")
    parser.add_argument(
        "--decisions", metavar="DATA", help="compare decisions on these questions, such as jsonl:train.jsonl.gz"
    )
    options = parser.parse_args()
    if options.decisions:
        compare_decisions(options.decisions, options.questions, options.file)
        return
    models = {"llama.cpp": load_model(f"llamacpp:{options.file}"), "transformers": load_model("smollm")}
    questions = [Question(form.format(country)) for form in FORMS for country in COUNTRIES][: options.questions]
    prompts = [AnswerPrompts().closed(question) for question in questions]
    for model in models.values():
        label(model, prompts[:1])  # loads the weights
    if options.agreement:
        compare_needs(models, questions)
        return
    for name, job in (("labeling", label), ("asking", ask)):
        compare_times(name, job, models, prompts)


def compare_times(
    name: str, job: Callable[[Model, list[Prompt]], None], models: dict[str, Model], prompts: list[Prompt]
) -> None:
    """Print the CPU seconds per question of a job with each model, and their ratio."""
    spent = dict.fromkeys(models, 0.0)
    for _ in range(ROUNDS):
        for model_name, model in models.items():
            start = time.process_time()
            job(model, prompts)
            spent[model_name] += time.process_time() - start
    per_question = {model_name: seconds / ROUNDS / len(prompts) for model_name, seconds in spent.items()}
    times = ", ".join(f"{model_name} {seconds:.2f} s" for model_name, seconds in per_question.items())
    ratio = per_question["transformers"] / per_question["llama.cpp"]
    print(f"{name}: {times} of CPU time per question; llama.cpp is {ratio:.2f} x as fast", flush=True)


def compare_needs(models: dict[str, Model], questions: list[Question]) -> None:
    """Print how the needs of two gates correlate between both models."""
    prompts = AnswerPrompts()
    for name in ("prompt", "logprob:first"):
        pairs = [(bind_gate(load_gate(name), model, prompts), model) for model in models.values()]
        needs = [
            score_with_raw(gate, questions, read_questions(model, [gate], questions, prompts)).needs
            for gate, model in pairs
        ]
        print(f"{name}: r = {np.corrcoef(*needs)[0, 1]:.4f} of {len(questions)} needs, "
              f"at most {np.abs(np.subtract(*needs)).max():.3f} apart", flush=True)  # fmt: skip


def compare_decisions(data: str, n: int, file: str) -> None:
    """Print after each batch how often the packaged gate decides the same with both models."""
    models, prompts = [load_model(f"llamacpp:{file}"), load_model("smollm")], AnswerPrompts()
    gates = [bind_gate(load_gate(str(PACKAGED_GATES / "smollm"), plug_in=True), model, prompts) for model in models]
    questions = load_questions(data)
    sample = np.random.default_rng(0).permutation(len(questions))[:n]
    needs: list[list[float]] = [[], []]
    for start in range(0, len(sample), GROUP):
        group = [questions[i] for i in sample[start : start + GROUP]]
        for scores, gate, model in zip(needs, gates, models, strict=True):
            scores += score_with_raw(gate, group, read_questions(model, [gate], group, prompts)).needs
        retrieves = [np.array(scores) > gate.threshold for scores, gate in zip(needs, gates, strict=True)]
        print(f"{len(needs[0])} questions: {np.mean(retrieves[0] == retrieves[1]):.1%} of the decisions agree, llama.cpp "
              f"retrieves {retrieves[0].mean():.1%}, transformers {retrieves[1].mean():.1%}, "
              f"r = {np.corrcoef(*needs)[0, 1]:.3f}", flush=True)  # fmt: skip


def label(model: Model, prompts: list[Prompt]) -> None:
    """Read all prompts with the signals of a label run."""
    request = SignalRequest(draft_tokens=12, layers=(15,), samples=5, sample_tokens=12, seed=0, resumable=False)
    model.read(prompts, request)


def ask(model: Model, prompts: list[Prompt]) -> None:
    """Answer the prompts one at a time."""
    for prompt in prompts:
        reading = model.read([prompt], SignalRequest(draft_tokens=4))[0]
        model.generate([prompt], max_tokens=16, resume=[reading.resume])


if __name__ == "__main__":
    main()
