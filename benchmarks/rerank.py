"""Measure the speed of the reranker, and the cost of preferences with half and with all layers of the LLM.

    python benchmarks/rerank.py [--questions 4] [--candidates 8] [--rounds 3]

Pairs per second: a MiniLM cross-encoder on question-passage pairs of about 100 tokens (wall time). Preferences: the
embedded model reads every candidate up to the middle layer, which the probe reads, and for comparison up to the last
layer. Both alternate on one thread; the median of the CPU times is reported. Memory: how much two preference runs add,
one with eight times as many questions as the other (fake LLM; most of it is imports).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WORDS = ["the", "bridge", "strait", "links", "bay", "and", "ocean", "was", "designed", "by", "an", "engineer", "in"]
FEW, MANY = 250, 2000


def measure_seconds(work: Callable[[], Any]) -> float:
    """Return the wall time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def generate_questions(n: int, candidates: int) -> list[Any]:
    """Return questions with candidate passages of random words."""
    from knowgate.types import Passage, Question

    rng = np.random.default_rng(0)

    def text() -> str:
        return " ".join(str(word) for word in rng.choice(WORDS, int(rng.integers(60, 110))))

    return [
        Question(
            f"Who designed the bridge number {i}?",
            id=str(i),
            contexts=tuple(Passage(f"{i}.{j}", f"{j} {text()}") for j in range(candidates)),
        )
        for i in range(n)
    ]


def fit_random_probe(model: Any, width: int) -> Any:
    """Return a probe of the middle layer, fitted to random states. It costs as much as a trained one."""
    from knowgate.gates.artifacts.gate_folder import Artifact
    from knowgate.gates.hidden_state import ProbeGate
    from knowgate.training.classifiers import fit_linear

    layer = model.depth // 2
    states = np.random.default_rng(0).standard_normal((40, width)).astype(np.float32)
    manifest = {
        "gate": "probe",
        "needs": ["hidden"],
        "want": {"layers": [layer]},
        "threshold": 0.5,
        "options": {"layer": layer, "position": "pre"},
        "checksum": "none",
    }
    return ProbeGate(Artifact(Path("probe"), manifest, fit_linear(states, states[:, 0] > 0, 1.0)))


def measure_pairs_per_second(questions: list[Any]) -> float:
    """Return how many question-passage pairs the reranker scores per second."""
    from knowgate.retrieval.rerankers.cross_encoder import CrossEncoderReranker
    from knowgate.training.reranker import open_cross_encoder

    reranker = CrossEncoderReranker.from_model(open_cross_encoder("minilm"), "minilm")
    texts, passages = [question.text for question in questions], [question.contexts for question in questions]
    reranker.score(texts[:1], [passages[0][:2]])  # warm up
    return sum(map(len, passages)) / measure_seconds(lambda: reranker.score(texts, passages))


def measure_cpu_seconds(work: Callable[[], Any]) -> float:
    """Return the CPU time of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure_preferences(questions: list[Any], rounds: int) -> list[tuple[float, float, float]]:
    """Return CPU seconds of each round: half of the layers, all layers with states, all layers without states.

    CPU time is measured, on one thread, because other processes affect wall time unevenly.
    """
    import torch

    from knowgate.models import load_model
    from knowgate.training.passage_effects import ConfidenceSource, build_passage_prompts
    from knowgate.types import SignalRequest

    model: Any = load_model("smollm")
    source = ConfidenceSource(model, fit_random_probe(model, model.loaded.model.config.hidden_size))
    contexts = [question.contexts for question in questions]
    prompts = build_passage_prompts(source.prompts, questions, contexts)
    with_states, without_states = (
        SignalRequest(layers=(model.depth // 2, model.depth - 1), resumable=False),
        SignalRequest(resumable=False),
    )
    torch.set_num_threads(1)
    for request in (SignalRequest(layers=with_states.layers[:1], resumable=False), with_states, without_states):
        model.read(prompts[:2], request)  # warm up
    return [
        (
            measure_cpu_seconds(lambda: source.measure(questions, contexts)),
            measure_cpu_seconds(lambda: model.read(prompts, with_states)),
            measure_cpu_seconds(lambda: model.read(prompts, without_states)),
        )
        for _ in range(rounds)
    ]


def measure_run_memory(n: int) -> float:
    """Return the MB that a preference run of n questions adds, measured in a process of its own."""
    process = subprocess.run([sys.executable, __file__, "--peak", str(n)], capture_output=True, text=True, check=True)
    return float(process.stdout)


def read_peak_memory() -> float:
    """Return the peak MB of this process. (A child process inherits `ru_maxrss` from its parent.)"""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def print_run_memory(n: int) -> None:
    """Run preferences of n questions with 20 candidates each, and print the MB that they added."""
    from knowgate.data.preferences import PreferenceFolder
    from knowgate.models.fake import FakeModel
    from knowgate.training.passage_effects import ConfidenceSource, PreferenceLabeler
    from knowgate.training.preference_run import run_preferences

    questions = generate_questions(n, 20)
    before = read_peak_memory()
    model = FakeModel()
    with tempfile.TemporaryDirectory() as folder:
        run_preferences(
            PreferenceFolder(Path(folder) / "p"),
            questions,
            PreferenceLabeler(ConfidenceSource(model, fit_random_probe(model, 16))),
            data="x",
        )
    print(read_peak_memory() - before)


def main() -> None:
    """Read the options and print all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=4, help="questions that the LLM and the reranker read")
    parser.add_argument("--candidates", type=int, default=8, help="passages per question")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median is reported")
    parser.add_argument(
        "--peak", type=int, help="only print the memory that a preference run of this many questions adds"
    )
    options = parser.parse_args()
    if options.peak:
        print_run_memory(options.peak)
        return
    questions = generate_questions(options.questions, options.candidates)
    print(f"reranker: {measure_pairs_per_second(questions):.1f} pairs/s", flush=True)
    times = measure_preferences(questions, options.rounds)
    half, full, plain = (float(np.median(column)) for column in zip(*times, strict=True))
    rows = options.questions * options.candidates
    print(
        f"preferences, passages per CPU second: {rows / half:.2f} stopping at the middle layer, {rows / full:.2f} to "
        f"the last ({full / half:.2f} x), {rows / plain:.2f} to the last without states ({plain / half:.2f} x); "
        "target >= 1.7 x"
    )
    print(
        "rounds:",
        " ".join(
            f"{with_states / half:.2f}/{without_states / half:.2f}" for half, with_states, without_states in times
        ),
        flush=True,
    )
    few, many = measure_run_memory(FEW), measure_run_memory(MANY)
    print(
        f"memory added by a preference run: {few:.0f} MB for {FEW} questions, {many:.0f} MB for {MANY} (target: no growth)"
    )


if __name__ == "__main__":
    main()
