"""Fitting from stored signals, and what a fitted probe adds to the forward pass.

    python benchmarks/fitting.py [--rows 10000] [--width 2048] [--no-model]

1. Seconds to fit the probe's network (three seeds) and a linear probe on planted states; aim: < 60 s on two cores.
2. Seconds of scoring a question with a probe against the pass that reads its state, side by side; aim: < 1 %.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np


def planted(rows: int, width: int) -> tuple[Any, Any]:
    """States with a rule in a few columns, hidden in noise."""
    rng = np.random.default_rng(0)
    states = rng.standard_normal((rows, width)).astype(np.float32)
    return states, states[:, :8].sum(axis=1) + 2 * rng.standard_normal(rows) > 0


def time_fits(rows: int, width: int) -> None:
    from knowgate.gates.artifacts.networks import apply_network
    from knowgate.stats.metrics import auroc
    from knowgate.training.classifiers import LabeledFeatures, fit_mlp, tune_linear

    states, needed = planted(rows, width)
    train, dev = slice(0, int(0.9 * rows)), slice(int(0.9 * rows), rows)
    for name, fit in (("linear probe", lambda *parts: tune_linear(*parts).tensors), ("network, three seeds", fit_mlp)):
        start = time.perf_counter()
        tensors = fit(*(LabeledFeatures(states[part], needed[part]) for part in (train, dev)))
        seconds = time.perf_counter() - start
        found = auroc(needed[dev], apply_network(tensors, states[dev]))
        print(f"{name}: {seconds:.1f} s for {rows} x {width}, dev AUROC {found:.3f}", flush=True)


def time_scoring(repeats: int = 20) -> None:
    from knowgate.gates.artifacts.networks import apply_network
    from knowgate.models import load_model
    from knowgate.models.prompts.answers import AnswerPrompts
    from knowgate.training.classifiers import LabeledFeatures, fit_mlp
    from knowgate.types import Question, SignalRequest

    model = load_model("smollm")
    prompt = AnswerPrompts().closed(Question("Who wrote the play that opens with two watchmen on a castle wall?"))
    layer = model.depth // 2
    want = SignalRequest(layers=(layer,), draft_tokens=1)
    state = model.read([prompt], want)[0].hidden[layer]
    states, needed = planted(200, len(state))
    tensors = fit_mlp(LabeledFeatures(states[:150], needed[:150]), LabeledFeatures(states[150:], needed[150:]))
    passes, scores = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        state = model.read([prompt], want)[0].hidden[layer]
        passes.append(time.perf_counter() - start)
        start = time.perf_counter()
        apply_network(tensors, state[None, :])
        scores.append(time.perf_counter() - start)
    one, other = float(np.median(scores)), float(np.median(passes))
    print(f"a probe takes {1e3 * one:.3f} ms, the pass {1e3 * other:.1f} ms: {one / other:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=2_048)
    parser.add_argument("--no-model", action="store_true")
    options = parser.parse_args()
    time_fits(options.rows, options.width)
    if not options.no_model:
        time_scoring()


if __name__ == "__main__":
    main()
