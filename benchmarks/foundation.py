"""Speed of the foundation, as ratios of two things run side by side in one process.

    python benchmarks/foundation.py            # all of it, some three minutes on two cores
    python benchmarks/foundation.py --quick    # fewer repetitions

What is compared:
1. one pass:   read (first-token gate) + go on generating, against plain closed-book generation of the same tokens
2. samples:    30 samples of 12 tokens from one prompt, against 30 single calls and transformers' own generate()
3. start:      second start of `knowgate ask` against the first (weights cached, conversion not), and peak memory
4. import:     `import knowgate`
5. streaming:  answers token by token (`answer_stream`), against the same answers at once
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


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratio_of_medians(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Medians of both, run in turns so that a slow moment of the machine hits both."""
    first(), second()
    times = [(seconds(first), seconds(second)) for _ in range(rounds)]
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times)


def one_pass(model: Any, rounds: int) -> tuple[float, float]:
    from knowgate.models.prompts.answers import AnswerPrompts
    from knowgate.types import Question, SignalRequest

    prompts = [AnswerPrompts().closed(Question(text)) for text in QUESTIONS]

    def gated() -> None:
        for prompt in prompts:
            reading = model.read([prompt], SignalRequest(draft_tokens=1))[0]
            model.generate([prompt], max_tokens=24, resume=[reading.resume])

    def plain() -> None:
        for prompt in prompts:
            model.generate([prompt], max_tokens=24)

    with_gate, without = ratio_of_medians(gated, plain, rounds)
    print(f"one pass: gated skip {with_gate:.2f} s, plain {without:.2f} s: {with_gate / without:.3f} x (aim <= 1.05)")
    return with_gate, without


def samples(model: Any, rounds: int) -> tuple[float, float, float]:
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
    # an end token would shorten answers at random: nobody stops early in this comparison
    model = FullLength(model)
    shared = seconds(lambda: model.generate([prompt], max_tokens=12, temperature=1.0, n=30, seed=0))
    single = seconds(lambda: [model.generate([prompt], max_tokens=12, temperature=1.0, n=1, seed=i) for i in range(30)])
    with torch.inference_mode():
        library = statistics.median(
            seconds(lambda: loaded.model.generate(ids, num_return_sequences=30, **settings)) for _ in range(rounds)
        )
    shared = statistics.median(
        seconds(lambda: model.generate([prompt], max_tokens=12, temperature=1.0, n=30, seed=0)) for _ in range(rounds)
    )
    print(
        f"30 samples x 12 tokens: shared prefill {shared:.2f} s; 30 single calls {single:.2f} s: "
        f"{single / shared:.1f} x (aim >= 5); transformers generate(num_return_sequences=30) {library:.2f} s: "
        f"{library / shared:.1f} x (aim >= 2)"
    )
    return shared, single, library


def streaming(model: Any, rounds: int) -> tuple[float, float]:
    from knowgate.gates import load_gate
    from knowgate.pipeline.adaptive_rag import AdaptiveRAG

    rag = AdaptiveRAG(FullLength(model), load_gate("never"), max_tokens=24)

    def streamed() -> None:
        for question in QUESTIONS:
            list(rag.answer_stream(question))

    def at_once() -> None:
        for question in QUESTIONS:
            rag.answer(question)

    pieces, whole = ratio_of_medians(streamed, at_once, rounds)
    print(f"streaming: token by token {pieces:.2f} s, at once {whole:.2f} s: {pieces / whole:.3f} x (aim <= 1.05)")
    return pieces, whole


class FullLength:
    """The same model with no token that ends an answer."""

    def __new__(cls, model: Any) -> Any:
        from knowgate.models.hf.model import HFModel

        twin = HFModel(model.source, model.label)
        twin.__dict__.update(loaded=model.loaded, stop_ids=frozenset(), prefix_cache=model.prefix_cache)
        return twin


ASK = """
import json, resource, sys
from knowgate.cli.main import run
code = run(["ask", "--json", "--docs", sys.argv[1], "What is the capital of France?"])
print(json.dumps({"mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}), file=sys.stderr)
sys.exit(code)
"""


def start() -> None:
    from knowgate.cli.demo.comparison import demo_folder
    from knowgate.models import embedded_weights as weights

    fetched = weights.fetch_weights("smollm")
    with tempfile.TemporaryDirectory() as cache:
        kept = Path(cache) / "weights"
        kept.mkdir()
        (kept / fetched.name).symlink_to(fetched)
        environment = {**os.environ, "KNOWGATE_CACHE": cache}
        command = [sys.executable, "-c", ASK, str(demo_folder() / "handbook")]
        times, peaks = [], []
        for _ in range(3):
            begin = time.perf_counter()
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            times.append(time.perf_counter() - begin)
            peaks.append(json.loads(done.stderr.strip().splitlines()[-1])["mb"])
    again = min(times[1:])
    print(f"start of ask: first {times[0]:.1f} s, again {again:.1f} s: {times[0] / again:.1f} x (aim >= 2)")
    print(f"peak memory of ask: first {peaks[0]:.0f} MB, again {max(peaks[1:]):.0f} MB (aim < 1500)")


def importing() -> None:
    code = "import time; t = time.perf_counter(); import knowgate; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    print(f"import knowgate: {min(times):.2f} s (aim < 0.3)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    rounds = 2 if parser.parse_args().quick else 5
    from knowgate.models import load_model

    importing()
    start()
    model = load_model("smollm")
    one_pass(model, rounds)
    samples(model, rounds)
    streaming(model, rounds)


if __name__ == "__main__":
    main()
