"""The reranker's speed, and what preferences cost: half the network against all of it, in one process.

    python benchmarks/rerank.py [--questions 4] [--candidates 8] [--rounds 3]

pairs/s: a MiniLM cross-encoder on question-passage pairs of some 100 tokens (wall time). Preferences: the embedded
model reads every candidate and stops at the middle layer (a probe's), against the same prompts read to the last one;
they take turns, on one thread, and the median of the CPU times counts. Memory: what two preference runs add, one of
eight times as many questions (fake LLM; the most part is imports).
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


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def questions(n: int, candidates: int) -> list[Any]:
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


def probe(model: Any, width: int) -> Any:
    """A probe of the middle layer that knows nothing; reading it costs what any probe's reading costs."""
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


def pairs_per_second(asked: list[Any]) -> float:
    from knowgate.retrieval.rerankers.cross_encoder import CrossEncoderReranker
    from knowgate.training.reranker_trainer import open_cross_encoder

    reranker = CrossEncoderReranker.from_model(open_cross_encoder("minilm"), "minilm")
    texts, passages = [question.text for question in asked], [question.contexts for question in asked]
    reranker.score(texts[:1], [passages[0][:2]])  # warm up
    return sum(map(len, passages)) / seconds(lambda: reranker.score(texts, passages))


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def preference_speed(asked: list[Any], rounds: int) -> list[tuple[float, float, float]]:
    """CPU seconds of each round, on one thread: half the network; all of it, keeping states; all of it, keeping none.

    CPU time, because other work on the machine stretches wall time unevenly.
    """
    import torch

    from knowgate.models import load_model
    from knowgate.training.passage_effects import ConfidenceSource, build_passage_prompts
    from knowgate.types import SignalRequest

    model: Any = load_model("smollm")
    source = ConfidenceSource(model, probe(model, model.loaded.model.config.hidden_size))
    contexts = [question.contexts for question in asked]
    prompts = build_passage_prompts(source.prompts, asked, contexts)
    kept, plain = (
        SignalRequest(layers=(model.depth // 2, model.depth - 1), resumable=False),
        SignalRequest(resumable=False),
    )
    torch.set_num_threads(1)
    for want in (SignalRequest(layers=kept.layers[:1], resumable=False), kept, plain):
        model.read(prompts[:2], want)  # warm up
    return [
        (
            cpu_seconds(lambda: source.measure(asked, contexts)),
            cpu_seconds(lambda: model.read(prompts, kept)),
            cpu_seconds(lambda: model.read(prompts, plain)),
        )
        for _ in range(rounds)
    ]


def peak_of(n: int) -> float:
    """Peak MB of a preference run of n questions with 20 candidates each, in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--peak", str(n)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def peak() -> float:
    """Peak MB of this process. Not ru_maxrss, which a child inherits from the process that started it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def run_for_peak(n: int) -> None:
    from knowgate.data.preferences import PreferenceFolder
    from knowgate.models.fake import FakeModel
    from knowgate.training.passage_effects import ConfidenceSource, PreferenceLabeler
    from knowgate.training.preference_run import run_preferences

    asked = questions(n, 20)
    before = peak()
    model = FakeModel()
    with tempfile.TemporaryDirectory() as folder:
        run_preferences(
            PreferenceFolder(Path(folder) / "p"),
            asked,
            PreferenceLabeler(ConfidenceSource(model, probe(model, 16))),
            data="x",
        )
    print(peak() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=4, help="questions the LLM and the reranker read")
    parser.add_argument("--candidates", type=int, default=8, help="passages of each")
    parser.add_argument("--rounds", type=int, default=3, help="turns of half and full pass; the median counts")
    parser.add_argument("--peak", type=int, help="only a preference run of so many questions; prints its memory")
    options = parser.parse_args()
    if options.peak:
        run_for_peak(options.peak)
        return
    asked = questions(options.questions, options.candidates)
    print(f"reranker: {pairs_per_second(asked):.1f} pairs/s", flush=True)
    times = preference_speed(asked, options.rounds)
    half, full, plain = (float(np.median(column)) for column in zip(*times, strict=True))
    rows = options.questions * options.candidates
    print(
        f"preferences, passages per CPU second: {rows / half:.2f} stopping at the middle layer, {rows / full:.2f} to "
        f"the last ({full / half:.2f} x), {rows / plain:.2f} to the last keeping no states ({plain / half:.2f} x); "
        "aim >= 1.7 x"
    )
    print("rounds:", " ".join(f"{one / own:.2f}/{two / own:.2f}" for own, one, two in times), flush=True)
    few, many = peak_of(FEW), peak_of(MANY)
    print(f"memory added by a preference run: {few:.0f} MB for {FEW} questions, {many:.0f} MB for {MANY} (aim: flat)")


if __name__ == "__main__":
    main()
