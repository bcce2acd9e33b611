"""Speed figures as ratios to what each is compared with, for `docs/speed.md`: `make bench`.

    python -m benchmarks.speed            # measure, write benchmarks/speed.json
    python -m benchmarks.speed --check    # measure, fail if a ratio is worse than the record by more than a third

A ratio is our time divided by the other time, so lower is better. Both sides run in turns, except for the samples, so that
other work on the machine slows both. Takes a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from benchmarks import evaluating, foundation
from benchmarks.tables.speed import RECORD

TOLERANCE = 4 / 3
ROUNDS = 3


class Figure(NamedTuple):
    """One ratio: our seconds, the seconds of what it is compared with, and words for both."""

    what: str
    compared_with: str
    seconds: float
    other_seconds: float

    @property
    def ratio(self) -> float:
        """Our time divided by the other time."""
        return self.seconds / self.other_seconds


# --- the figures ----------------------------------------------------------------------------------


def measure_help() -> list[Figure]:
    """The first page of the command line, beside the import of the libraries that draw it."""

    def run(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    times = foundation.measure_medians(
        lambda: run("-m", "knowgate", "--help"), lambda: run("-c", "import typer, rich.console, rich.table"), 5
    )
    return [Figure("`knowgate --help`", "importing typer and rich in Python", *times)]


def measure_model() -> list[Figure]:
    """Gated answers, samples and streams of the embedded model, beside plain generation."""
    from knowgate.models import load_model

    model = load_model("smollm")
    shared, single, library = foundation.measure_samples(model, ROUNDS)
    return [
        Figure(
            "a question that the gate skips, first token read and answered",
            "plain generation of the same tokens",
            *foundation.measure_one_pass(model, ROUNDS),
        ),
        Figure("30 samples of one prompt", "30 single calls", shared, single),
        Figure("30 samples of one prompt", "`generate(num_return_sequences=30)` of transformers", shared, library),
        Figure("an answer as a stream", "the same answer at once", *foundation.measure_streaming(model, ROUNDS)),
    ]


def measure_labels() -> list[Figure]:
    """Labeling with the fake model, beside its bare calls and searches."""
    from knowgate.labels.labeling import label
    from knowgate.models import load_model
    from knowgate.models.prompts.answers import AnswerPrompts
    from knowgate.retrieval import load_retriever
    from knowgate.retrieval.index import build_index
    from knowgate.types import Question

    rng = np.random.default_rng(0)
    words = [f"word{number}" for number in range(500)]
    texts = [" ".join(rng.choice(words, 60)) for _ in range(2_000)]
    questions = [
        Question(f"Where is {' '.join(rng.choice(words, 4))}?", id=str(number), answers=(str(rng.choice(words)),))
        for number in range(600)
    ]
    model, prompts = load_model("fake"), AnswerPrompts()
    with tempfile.TemporaryDirectory() as folder:
        corpus, index = Path(folder, "corpus.jsonl"), Path(folder, "index")
        lines = [json.dumps({"id": str(number), "text": text}) for number, text in enumerate(texts)]
        corpus.write_text("\n".join(lines), encoding="utf-8")
        build_index(corpus, index)
        runs = iter(range(100))

        def labels() -> None:
            label(questions, out=Path(folder, f"run{next(runs)}"), model=model, samples=0, index=str(index))

        def bare() -> None:
            passages = load_retriever(str(index)).search([question.text for question in questions], 3)
            model.generate([prompts.closed(question) for question in questions], max_tokens=32)
            pairs = zip(questions, passages, strict=True)
            model.generate([prompts.open(question, group) for question, group in pairs], max_tokens=32)

        times = foundation.measure_medians(labels, bare, ROUNDS)
    return [Figure("labeling 600 questions with a fake model", "only its searches and its two calls", *times)]


def measure_evaluation() -> list[Figure]:
    """Comparing gates with intervals, beside the same number of plain resampled means."""
    table, gates = evaluating.make_random_table(5, 2_000)
    from knowgate.evaluation.gate_comparison import compare_gates

    resamples = compare_gates(table, gates).resamples
    hits = np.random.default_rng(0).random(2_000) < 0.5

    def plain() -> None:
        rng = np.random.default_rng(0)
        for _ in gates:
            for _ in range(resamples):
                hits[rng.integers(0, len(hits), len(hits))].mean()

    times = foundation.measure_medians(lambda: compare_gates(table, gates), plain, ROUNDS)
    return [Figure("`eval` of 5 gates on 2,000 rows, all intervals", f"{resamples:,} resampled means per gate", *times)]


def measure_server() -> list[Figure]:
    """A request through the server, beside the same request straight to the upstream."""
    from benchmarks import serving
    from knowgate.pipeline.settings import PipelineOptions
    from knowgate.server.options import ServeOptions

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        docs = folder / "docs.jsonl"
        docs.write_text('{"id": "d1", "text": "Jane Austen wrote Emma."}\n', encoding="utf-8")
        stub = stack.enter_context(serving.start_process(serving.serve_stub))
        direct = stub.recv()
        settings, options = PipelineOptions(gate="never", docs=docs), ServeOptions(upstream=direct, waiting=1000)
        ours = stack.enter_context(serving.start_process(serving.serve_knowgate, settings, options)).recv()

        def request(url: str) -> None:
            asyncio.run(serving.send_load(url, 16, 400, [serving.BODY]))

        times = foundation.measure_medians(lambda: request(ours), lambda: request(direct), ROUNDS)
    return [
        Figure("400 requests through the server, 16 clients", "straight to an upstream that answers at once", *times)
    ]


def measure_judges() -> list[Figure]:
    """The small judge and the exported one, beside SmolLM2-135M in torch."""
    from benchmarks import judge_speed
    from knowgate.types import Question

    cases: list[Any] = [
        SimpleNamespace(question=Question(f"{text} ({number})"), texts={"closed": "It is Paris, as most people know."})
        for number in range(5)
        for text in foundation.QUESTIONS
    ]
    with tempfile.TemporaryDirectory() as scratch:
        judges = {
            name: judge_speed.load_timed_judge(name, Path(scratch)) for name in ("minilm", "llamacpp:smollm", "smollm")
        }
        times = judge_speed.time_judges(judges, cases)
    seconds = {name: float(np.median([clock for clock, _ in pairs])) for name, pairs in times.items()}
    reference = "a judge of 135M parameters in torch (SmolLM2)"
    return [
        Figure("the small judge (MiniLM, 22M)", reference, seconds["minilm"], seconds["smollm"]),
        Figure("the 135M judge exported to llama.cpp", reference, seconds["llamacpp:smollm"], seconds["smollm"]),
    ]


MEASUREMENTS: tuple[Callable[[], list[Figure]], ...] = (
    measure_help,
    measure_model,
    measure_labels,
    measure_evaluation,
    measure_server,
    measure_judges,
)


# --- the record and the guard ---------------------------------------------------------------------


def list_worse(figures: list[Figure], record: dict[str, Any]) -> list[str]:
    """Return a line for each ratio that is worse than the record by more than a third.

    Args:
        figures: New measurements.
        record: Content of `benchmarks/speed.json`.
    """
    before = {(row["what"], row["compared_with"]): row["ratio"] for row in record["figures"]}
    return [
        f"{figure.what}, compared with {figure.compared_with}: {figure.ratio:.2f}, recorded {recorded:.2f}"
        for figure in figures
        if (recorded := before.get((figure.what, figure.compared_with))) and figure.ratio > TOLERANCE * recorded
    ]


def check() -> list[str]:
    """Measure everything; measure again what seems worse, and return what is worse both times."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    worse: list[str] = []
    for measure in MEASUREMENTS:
        if list_worse(measure(), record):
            worse += list_worse(measure(), record)
    return worse


def write_record(figures: list[Figure]) -> None:
    """Write the figures to `benchmarks/speed.json`."""
    rows = [
        {
            "what": figure.what,
            "compared_with": figure.compared_with,
            "seconds": float(f"{figure.seconds:.3g}"),
            "other_seconds": float(f"{figure.other_seconds:.3g}"),
            "ratio": float(f"{figure.ratio:.3g}"),
        }
        for figure in figures
    ]
    record = {
        "cores": os.cpu_count(),
        "note": f"Measured in one run at a load of {os.getloadavg()[0]:.1f}.",
        "figures": rows,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Measure, and write the record or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the record instead of writing it")
    if parser.parse_args().check:
        worse = check()
        print("\n".join(["Worse than the record by more than a third:", *worse] if worse else ["No ratio is worse."]))
        return int(bool(worse))
    write_record([figure for measure in MEASUREMENTS for figure in measure()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
