"""Measure how long it takes to fit probes on stored hidden states, and to score a question with a probe.

    python benchmarks/fitting.py [--rows 10000] [--width 2048] [--no-model]

1. Seconds to fit a linear probe and a network probe (three seeds) on generated states. Target: < 60 s on two cores.
2. Time to score a question with a probe, as a share of the forward pass that reads its state. Target: < 1 %.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np


def generate_states(rows: int, width: int) -> tuple[Any, Any]:
    """Return random hidden states, and labels that depend on eight of their columns and on noise."""
    rng = np.random.default_rng(0)
    states = rng.standard_normal((rows, width)).astype(np.float32)
    return states, states[:, :8].sum(axis=1) + 2 * rng.standard_normal(rows) > 0


def time_fits(rows: int, width: int) -> None:
    """Print the seconds to fit each kind of probe, and its AUROC on dev rows."""
    from knowgate.gates.artifacts.networks import apply_network
    from knowgate.stats.metrics import auroc
    from knowgate.training.classifiers import LabeledFeatures, fit_mlp, tune_linear

    states, needed = generate_states(rows, width)
    train, dev = slice(0, int(0.9 * rows)), slice(int(0.9 * rows), rows)
    for name, fit in (("linear probe", lambda *parts: tune_linear(*parts).tensors), ("network, three seeds", fit_mlp)):
        start = time.perf_counter()
        tensors = fit(*(LabeledFeatures(states[part], needed[part]) for part in (train, dev)))
        seconds = time.perf_counter() - start
        dev_auroc = auroc(needed[dev], apply_network(tensors, states[dev]))
        print(f"{name}: {seconds:.1f} s for {rows} x {width}, dev AUROC {dev_auroc:.3f}", flush=True)


def time_scoring(repeats: int = 20) -> None:
    """Print the time of a probe and of the forward pass that reads its hidden state; medians over the repeats."""
    from knowgate.gates.artifacts.networks import apply_network
    from knowgate.models import load_model
    from knowgate.models.prompts.answers import AnswerPrompts
    from knowgate.training.classifiers import LabeledFeatures, fit_mlp
    from knowgate.types import Question, SignalRequest

    model = load_model("smollm")
    prompt = AnswerPrompts().closed(Question("Who wrote the play that opens with two watchmen on a castle wall?"))
    layer = model.depth // 2
    request = SignalRequest(layers=(layer,), draft_tokens=1)
    state = model.read([prompt], request)[0].hidden[layer]
    states, needed = generate_states(200, len(state))
    tensors = fit_mlp(LabeledFeatures(states[:150], needed[:150]), LabeledFeatures(states[150:], needed[150:]))
    pass_seconds, probe_seconds = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        state = model.read([prompt], request)[0].hidden[layer]
        pass_seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        apply_network(tensors, state[None, :])
        probe_seconds.append(time.perf_counter() - start)
    probe, forward_pass = float(np.median(probe_seconds)), float(np.median(pass_seconds))
    print(
        f"a probe takes {1e3 * probe:.3f} ms, the forward pass {1e3 * forward_pass:.1f} ms: {probe / forward_pass:.2%}"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000, help="number of states to fit on")
    parser.add_argument("--width", type=int, default=2_048, help="width of the states")
    parser.add_argument("--no-model", action="store_true", help="measure the fits only")
    options = parser.parse_args()
    time_fits(options.rows, options.width)
    if not options.no_model:
        time_scoring()


if __name__ == "__main__":
    main()
