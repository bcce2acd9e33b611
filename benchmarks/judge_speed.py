"""What a question costs a judge without a GPU: CPU time of one core, one question at a time.

    python -m benchmarks.judge_speed minilm mpnet smollm gguf:FILE

CPU time, not time on the clock, so that it says the same beside other work. Two cores take half of it at best. Nothing
that was trained is needed: the cost is that of the base.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.judge_recipes import KINDS, Case, load_cases
from knowgate.gates import ANSWER_LABELS, Judge, PairEncoder, encoder_source, is_encoder, open_base

QUESTIONS, TIMES = 12, 3
Asking = tuple[Callable[[Case], object], Callable[[Case], int]]


def encoder(spec: str) -> Asking:
    opened = PairEncoder(encoder_source(spec))
    opened.open()

    def ids(case: Case) -> list[int]:
        return opened.encode(case.question.text, case.texts["closed"])

    return lambda case: opened.known([ids(case)]), lambda case: len(ids(case))


def causal(spec: str) -> Asking:
    judge = Judge(open_base(spec), ANSWER_LABELS)

    def text(case: Case) -> str:
        return KINDS["judge"].text(case.question, case.texts)

    return lambda case: judge.known([judge.encode(text(case))]), lambda case: len(judge.encode(text(case)).ids)


def core_ms(ask: Callable[[Case], object], cases: Sequence[Case]) -> float:
    """Mean over the questions of the best of some tries."""
    ask(cases[0])  # what the first call pays alone
    best = []
    for case in cases:
        tries = []
        for _ in range(TIMES):
            start = time.thread_time()
            ask(case)
            tries.append(time.thread_time() - start)
        best.append(min(tries))
    return float(1000 * np.mean(best))


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bases", nargs="+", help="minilm, mpnet, smollm, hf:NAME, gguf:FILE")
    torch.set_num_threads(1)
    tested = load_cases("test")
    cases = tested[:: len(tested) // QUESTIONS][:QUESTIONS]
    for spec in parser.parse_args().bases:
        ask, size = encoder(spec) if is_encoder(spec) else causal(spec)
        read = np.mean([size(case) for case in cases])
        print(f"{spec}: {core_ms(ask, cases):.1f} ms of one core, {read:.0f} tokens", flush=True)


if __name__ == "__main__":
    main()
