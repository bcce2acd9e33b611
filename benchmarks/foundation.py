"""Measure the speed of the embedded model as ratios of two alternatives that run alternately in one process.

    python benchmarks/foundation.py            # everything, about three minutes on two cores
    python benchmarks/foundation.py --quick    # fewer repetitions

Comparisons:
1. one pass:   first-token gate, then generation, against plain closed-book generation of the same tokens
2. samples:    30 samples of 12 tokens from one prompt, against 30 single calls and generate() of transformers
3. start:      second start of `knowgate ask` against the first (weights are cached but not converted), and peak memory
4. import:     `import knowgate`
5. streaming:  answers token by token (`answer_stream`), against complete answers
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUESTIONS = [
    "What is the capital of France?",
    "Who wrote the novel Moby-Dick?",
    "What is the largest ocean on our planet?",
    "How many days are there in a leap year?",
]


def measure_seconds(work: Callable[[], Any]) -> float:
    """Return the wall time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_medians(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Return the median seconds of two calls, which alternate so that other load affects both alike."""
    first(), second()
    times = [(measure_seconds(first), measure_seconds(second)) for _ in range(rounds)]
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times)


def measure_one_pass(model: Any, rounds: int) -> tuple[float, float]:
    """Return the seconds of answers with a first-token gate, and of the same answers without it."""
    from knowgate.models.prompts.answers import AnswerPrompts
    from knowgate.types import Question, SignalRequest

    prompts = [AnswerPrompts().closed(Question(text)) for text in QUESTIONS]

    def answer_with_gate() -> None:
        for prompt in prompts:
            reading = model.read([prompt], SignalRequest(draft_tokens=1))[0]
            model.generate([prompt], max_tokens=24, resume=[reading.resume])

    def answer_without_gate() -> None:
        for prompt in prompts:
            model.generate([prompt], max_tokens=24)

    with_gate, without = measure_medians(answer_with_gate, answer_without_gate, rounds)
    print(
        f"one pass: gated skip {with_gate:.2f} s, plain {without:.2f} s: {with_gate / without:.3f} x (target <= 1.05)"
    )
    return with_gate, without


def measure_samples(model: Any, rounds: int) -> tuple[float, float, float]:
    """Return the seconds of 30 samples: with a shared prefill, as single calls, with `generate` of transformers."""
    import torch

    from knowgate.models.prompts.answers import AnswerPrompts
    from knowgate.types import Question

    prompt = AnswerPrompts().closed(Question(QUESTIONS[1]))
    loaded = model.loaded
    ids = torch.tensor([model.tokenize(model.render(prompt.text))])
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": 12,
        "min_new_tokens": 12,
        "pad_token_id": model.pad_id,
    }
    # An end token would shorten answers at random, so end tokens are disabled.
    model = disable_end_tokens(model)
    shared = measure_seconds(lambda: model.generate([prompt], max_tokens=12, temperature=1.0, n=30, seed=0))
    single = measure_seconds(
        lambda: [model.generate([prompt], max_tokens=12, temperature=1.0, n=1, seed=i) for i in range(30)]
    )
    with torch.inference_mode():
        library = statistics.median(
            measure_seconds(lambda: loaded.model.generate(ids, num_return_sequences=30, **settings))
            for _ in range(rounds)
        )
    shared = statistics.median(
        measure_seconds(lambda: model.generate([prompt], max_tokens=12, temperature=1.0, n=30, seed=0))
        for _ in range(rounds)
    )
    print(
        f"30 samples x 12 tokens: shared prefill {shared:.2f} s; 30 single calls {single:.2f} s: "
        f"{single / shared:.1f} x (target >= 5); transformers generate(num_return_sequences=30) {library:.2f} s: "
        f"{library / shared:.1f} x (target >= 2)"
    )
    return shared, single, library


def measure_streaming(model: Any, rounds: int) -> tuple[float, float]:
    """Return the seconds of streamed answers, and of the same answers returned as a whole."""
    from knowgate.gates import load_gate
    from knowgate.pipeline.adaptive_rag import AdaptiveRAG

    rag = AdaptiveRAG(disable_end_tokens(model), load_gate("never"), max_tokens=24)

    def answer_streamed() -> None:
        for question in QUESTIONS:
            list(rag.answer_stream(question))

    def answer_whole() -> None:
        for question in QUESTIONS:
            rag.answer(question)

    streamed, whole = measure_medians(answer_streamed, answer_whole, rounds)
    print(
        f"streaming: token by token {streamed:.2f} s, as a whole {whole:.2f} s: {streamed / whole:.3f} x (target <= 1.05)"
    )
    return streamed, whole


def disable_end_tokens(model: Any) -> Any:
    """Return a model with the same weights in which no token ends an answer."""
    from knowgate.models.hf.model import HFModel

    copy = HFModel(model.source, model.label)
    copy.__dict__.update(loaded=model.loaded, stop_ids=frozenset(), prefix_cache=model.prefix_cache)
    return copy


ASK = """
import json, resource, sys
from knowgate.cli.main import run
code = run(["ask", "--json", "--docs", sys.argv[1], "What is the capital of France?"])
print(json.dumps({"mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}), file=sys.stderr)
sys.exit(code)
"""


def measure_start() -> None:
    """Print seconds and peak memory of the first and of later starts of `knowgate ask`."""
    from knowgate.cli.demo.comparison import demo_folder
    from knowgate.models import embedded_weights

    weights_file = embedded_weights.fetch_weights("smollm")
    with tempfile.TemporaryDirectory() as cache:
        weights_folder = Path(cache) / "weights"
        weights_folder.mkdir()
        (weights_folder / weights_file.name).symlink_to(weights_file)
        environment = {**os.environ, "KNOWGATE_CACHE": cache}
        command = [sys.executable, "-c", ASK, str(demo_folder() / "handbook")]
        times, peaks = [], []
        for _ in range(3):
            start = time.perf_counter()
            process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            times.append(time.perf_counter() - start)
            peaks.append(json.loads(process.stderr.strip().splitlines()[-1])["mb"])
    later = min(times[1:])
    print(f"start of ask: first {times[0]:.1f} s, later {later:.1f} s: {times[0] / later:.1f} x (target >= 2)")
    print(f"peak memory of ask: first {peaks[0]:.0f} MB, later {max(peaks[1:]):.0f} MB (target < 1500)")


def measure_import() -> None:
    """Print the seconds of `import knowgate`."""
    code = "import time; t = time.perf_counter(); import knowgate; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    print(f"import knowgate: {min(times):.2f} s (target < 0.3)")


def main() -> None:
    """Print all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    rounds = 2 if parser.parse_args().quick else 5
    from knowgate.models import load_model

    measure_import()
    measure_start()
    model = load_model("smollm")
    measure_one_pass(model, rounds)
    measure_samples(model, rounds)
    measure_streaming(model, rounds)


if __name__ == "__main__":
    main()
