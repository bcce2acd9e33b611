"""llama.cpp in-process against transformers on the embedded model's weights, side by side, in processor time.

python benchmarks/llamacpp.py [--questions 8] [--file OTHER.gguf]

Both take turns question group by question group, so that other work on the machine slows both. Prints, for labelling
(a draft, 5 samples, states) and for asking (one question at a time), seconds of each and their ratio. llama.cpp's
threads wait for each other by counting: with more threads than idle cores (OMP_NUM_THREADS says how many) that counts,
too. --agreement: how the needs of two gates, of as many questions, go together (aim: r >= .98). --decisions DATA: how often
the packaged gate, which reads hidden states before and after the draft, decides the same with both (aim: 99 %).
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

PLACES = [
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
GROUP = 20  # questions read at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--file", default=str(find_gguf_file("smollm")))
    parser.add_argument("--agreement", action="store_true")
    parser.add_argument("--decisions", metavar="DATA", help="questions, such as jsonl:train.jsonl.gz")
    given = parser.parse_args()
    if given.decisions:
        compare_decisions(given.decisions, given.questions, given.file)
        return
    models = {"llama.cpp": load_model(f"llamacpp:{given.file}"), "transformers": load_model("smollm")}
    asked = [Question(form.format(place)) for form in FORMS for place in PLACES][: given.questions]
    prompts = [AnswerPrompts().closed(question) for question in asked]
    for model in models.values():
        label(model, prompts[:1])  # loads
    if given.agreement:
        agree(models, asked)
        return
    for name, job in (("labelling", label), ("asking", ask)):
        compare(name, job, models, prompts)


def compare(
    name: str, job: Callable[[Model, list[Prompt]], None], models: dict[str, Model], prompts: list[Prompt]
) -> None:
    spent = dict.fromkeys(models, 0.0)
    for _ in range(ROUNDS):
        for which, model in models.items():
            start = time.process_time()
            job(model, prompts)
            spent[which] += time.process_time() - start
    each = {which: seconds / ROUNDS / len(prompts) for which, seconds in spent.items()}
    told = ", ".join(f"{which} {seconds:.2f} s" for which, seconds in each.items())
    ratio = each["transformers"] / each["llama.cpp"]
    print(f"{name}: {told} of processor time a question; llama.cpp is {ratio:.2f} x as fast", flush=True)


def agree(models: dict[str, Model], asked: list[Question]) -> None:
    prompts = AnswerPrompts()
    for name in ("prompt", "logprob:first"):
        pairs = [(bind_gate(load_gate(name), model, prompts), model) for model in models.values()]
        needs = [
            score_with_raw(gate, asked, read_questions(model, [gate], asked, prompts)).needs for gate, model in pairs
        ]
        print(f"{name}: r = {np.corrcoef(*needs)[0, 1]:.4f} of {len(asked)} needs, "
              f"at most {np.abs(np.subtract(*needs)).max():.3f} apart", flush=True)  # fmt: skip


def compare_decisions(data: str, n: int, file: str) -> None:
    """Print how often the packaged gate decides the same on both, group by group, so that a run can be stopped."""
    models, prompts = [load_model(f"llamacpp:{file}"), load_model("smollm")], AnswerPrompts()
    gates = [bind_gate(load_gate(str(PACKAGED_GATES / "smollm"), plug_in=True), model, prompts) for model in models]
    questions = load_questions(data)
    drawn = np.random.default_rng(0).permutation(len(questions))[:n]
    needs: list[list[float]] = [[], []]
    for start in range(0, len(drawn), GROUP):
        group = [questions[i] for i in drawn[start : start + GROUP]]
        for own, gate, model in zip(needs, gates, models, strict=True):
            own += score_with_raw(gate, group, read_questions(model, [gate], group, prompts)).needs
        retrieves = [np.array(own) > gate.threshold for own, gate in zip(needs, gates, strict=True)]
        print(f"{len(needs[0])} questions: {np.mean(retrieves[0] == retrieves[1]):.1%} of the decisions agree, llama.cpp "
              f"retrieves {retrieves[0].mean():.1%}, transformers {retrieves[1].mean():.1%}, "
              f"r = {np.corrcoef(*needs)[0, 1]:.3f}", flush=True)  # fmt: skip


def label(model: Model, prompts: list[Prompt]) -> None:
    want = SignalRequest(draft_tokens=12, layers=(15,), samples=5, sample_tokens=12, seed=0, resumable=False)
    model.read(prompts, want)


def ask(model: Model, prompts: list[Prompt]) -> None:
    for prompt in prompts:
        reading = model.read([prompt], SignalRequest(draft_tokens=4))[0]
        model.generate([prompt], max_tokens=16, resume=[reading.resume])


if __name__ == "__main__":
    main()
