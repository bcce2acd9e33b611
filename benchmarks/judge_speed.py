"""Measure how long judges take per question without a GPU, one question at a time, on two cores.

    python -m benchmarks.judge_speed --record
    python -m benchmarks.judge_speed frozen:minilm minilm mpnet smollm llamacpp:smollm gguf:FILE llamacpp:gguf:FILE

All judges are loaded into one process. Every judge scores each question, and the order of the judges is reversed from
question to question, so that other work on the machine slows all of them alike. The ratios are therefore more reliable
than the milliseconds; each is the median over the questions. Base models are enough, since training does not change the
cost. `--record` writes the file behind the table of RESULTS.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.judge_answers import HOME, JUDGES
from benchmarks.judge_recipes import Case, load_cases
from benchmarks.tables.judge_speed import SPEED
from knowgate.core.files import write_json
from knowgate.data.signals.vectors import text_features
from knowgate.gates.judges import ANSWER_LABELS
from knowgate.gates.judges.causal_judge import CausalJudge, load_judge_base
from knowgate.gates.judges.encoder_judge import PairEncoder, is_encoder_spec, resolve_encoder
from knowgate.models.gguf import find_gguf_file, write_gguf
from knowgate.models.llamacpp.classifier import LlamaCppClassifier
from knowgate.models.prompts.questions import build_correctness_prompt
from knowgate.retrieval.embeddings import SentenceEmbedder

CORES, QUESTIONS, ANSWER_TOKENS = 2, 20, 64
REFERENCE = "smollm"
DEFAULT_SPECS = ("frozen:minilm", "minilm", "mpnet", "smollm", "llamacpp:smollm")
FROZEN, LLAMACPP = "frozen:", "llamacpp:"
load_base_once = functools.cache(load_judge_base)  # Judges with the same base share its weights.


@dataclass(frozen=True)
class TimedJudge:
    """A judge whose cost is measured.

    Attributes:
        score: Scores a case.
        count_tokens: Returns the number of tokens that the judge reads of a case; None if it is not known.
    """

    score: Callable[[Case], object]
    count_tokens: Callable[[Case], int] | None = None


@dataclass(frozen=True)
class Cost:
    """Cost of a judge per question; medians over the questions.

    Attributes:
        ms: Milliseconds of wall-clock time.
        core_ms: Milliseconds of CPU time, over all cores.
        ratio: Wall-clock time of the reference judge for the same question, divided by this judge's.
        core_ratio: The same ratio of CPU times.
        tokens: Mean number of tokens that the judge reads.
    """

    ms: float
    core_ms: float
    ratio: float
    core_ratio: float
    tokens: float | None


def load_frozen_encoder(spec: str, scratch: Path) -> TimedJudge:
    """Load an encoder whose embeddings are the features of a linear classifier."""
    embedder = SentenceEmbedder(spec.removeprefix(FROZEN))
    return TimedJudge(lambda case: text_features(embedder, [case.question], [case.texts["closed"]], ANSWER_TOKENS))


def load_pair_encoder(spec: str, scratch: Path) -> TimedJudge:
    """Load a cross-encoder."""
    encoder = PairEncoder(resolve_encoder(spec))
    encoder.load_weights()

    def encode(case: Case) -> list[int]:
        return encoder.encode(case.question.text, case.texts["closed"])

    return TimedJudge(lambda case: encoder.predict_known([encode(case)]), lambda case: len(encode(case)))


def load_causal_llm(spec: str, scratch: Path) -> TimedJudge:
    """Load a causal LLM in torch."""
    judge = CausalJudge(load_base_once(spec), ANSWER_LABELS)
    return TimedJudge(
        lambda case: judge.predict_known([judge.encode(build_prompt(case))]),
        lambda case: len(judge.encode(build_prompt(case)).ids),
    )


def load_llamacpp(spec: str, scratch: Path) -> TimedJudge:
    """Load a causal LLM in llama.cpp.

    A GGUF file (llamacpp:gguf:FILE) is used as it is. Other bases are exported as `knowgate export-judge` does it.
    """
    base = load_base_once(spec.removeprefix(LLAMACPP))
    tokenizer_file, gguf_file = scratch / f"{abs(hash(spec))}.json", find_gguf_file(spec.removeprefix(LLAMACPP))
    base.loaded.tokenizer.backend_tokenizer.save(str(tokenizer_file))
    names_gguf = spec.startswith(f"{LLAMACPP}gguf:")
    file = gguf_file if gguf_file is not None and names_gguf else scratch / f"{tokenizer_file.stem}.gguf"
    if not file.is_file():
        write_gguf(file, base.loaded.model, base.loaded.tokenizer, number_format="q8_0", tokenizer_source=gguf_file)
    judge, classifier = CausalJudge(base, ANSWER_LABELS), LlamaCppClassifier(file, tokenizer_file, CORES)
    label_tokens = judge.label_tokens

    def encode(case: Case) -> list[int]:
        return judge.encode(build_prompt(case)).ids

    return TimedJudge(
        lambda case: classifier.score_token_pair(encode(case), label_tokens), lambda case: len(encode(case))
    )


def build_prompt(case: Case) -> str:
    """Build the prompt that asks whether the closed-book answer is right."""
    return build_correctness_prompt(case.question, case.texts["closed"])


def load_timed_judge(spec: str, scratch: Path) -> TimedJudge:
    """Load a judge.

    Args:
        spec: Base model: an encoder, a model spec, "frozen:ENCODER" or "llamacpp:SPEC".
        scratch: Folder for exported files.
    """
    loaders = {FROZEN: load_frozen_encoder, LLAMACPP: load_llamacpp}
    default = load_pair_encoder if is_encoder_spec(spec) else load_causal_llm
    loader = next((loader for prefix, loader in loaders.items() if spec.startswith(prefix)), default)
    return loader(spec, scratch)


def time_judges(judges: Mapping[str, TimedJudge], cases: Sequence[Case]) -> dict[str, list[tuple[float, float]]]:
    """Measure wall-clock and CPU seconds of each judge for each question, except the first, which warms up.

    Pass each question once: llama.cpp does not process a repeated prompt again.
    """
    first, *others = cases
    for judge in judges.values():
        judge.score(first)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in judges}
    for number, case in enumerate(others):
        order = list(judges) if number % 2 else list(judges)[::-1]
        for name in order:
            clock, core = time.perf_counter(), time.process_time()
            judges[name].score(case)
            times[name].append((time.perf_counter() - clock, time.process_time() - core))
        print(f"{number + 1} of {len(others)} questions", end="\r", flush=True)
    return times


def compute_costs(
    times: Mapping[str, Sequence[tuple[float, float]]], judges: Mapping[str, TimedJudge], cases: Sequence[Case]
) -> dict[str, Cost]:
    """Return the cost of each judge.

    Args:
        times: Wall-clock and CPU seconds of each judge per question.
        judges: The judges.
        cases: Questions to count tokens of.
    """
    reference = np.array(times[REFERENCE if REFERENCE in times else next(iter(times))]).T
    costs = {}
    for name, pairs in times.items():
        clock, core = np.array(pairs).T
        count = judges[name].count_tokens
        tokens = None if count is None else round(float(np.mean([count(case) for case in cases])), 1)
        costs[name] = Cost(
            round(1000 * float(np.median(clock)), 1),
            round(1000 * float(np.median(core)), 1),
            *(round(float(np.median(other / own)), 2) for other, own in zip(reference, (clock, core), strict=True)),
            tokens,
        )
    return costs


def make_record(costs: Mapping[str, Cost], questions: int, load: Iterable[float]) -> dict[str, object]:
    """Return the content of the record of speed.

    Args:
        costs: Cost of each judge.
        questions: Number of questions.
        load: Load averages of the machine.
    """
    return {
        "judges": {name: asdict(cost) for name, cost in costs.items()},
        "cores": CORES,
        "questions": questions,
        "reference": REFERENCE,
        "load": [round(value, 1) for value in load],
        "how": "one process, one question at a time, order turned round; medians. Where the load is above the cores, "
        "other work ran on them: ratios are of neighbouring runs and say more than the milliseconds.",
    }


def main() -> None:
    """Run the command line."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bases", nargs="*", help=f"judges to measure; default: {', '.join(DEFAULT_SPECS)}")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="number of questions")
    parser.add_argument("--record", action="store_true", help=f"write {JUDGES}/{SPEED}")
    options = parser.parse_args()
    torch.set_num_threads(CORES)
    test = load_cases("test")
    cases = test[:: len(test) // (options.questions + 1)][: options.questions + 1]
    with tempfile.TemporaryDirectory() as scratch:
        judges = {spec: load_timed_judge(spec, Path(scratch)) for spec in options.bases or DEFAULT_SPECS}
        costs = compute_costs(time_judges(judges, cases), judges, cases)
    named = {remove_folder(spec): cost for spec, cost in costs.items()}
    record = make_record(named, options.questions, os.getloadavg())
    if options.record:
        write_json(HOME / JUDGES / SPEED, record)
    print(json.dumps(record, indent=1))


def remove_folder(spec: str) -> str:
    """Return the spec with the name of its GGUF file instead of the path."""
    kind, gguf, file = spec.partition("gguf:")
    return f"{kind}{gguf}{Path(file).name}" if gguf else spec


if __name__ == "__main__":
    main()
