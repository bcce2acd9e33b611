"""What a question costs judges without a GPU: all of them side by side, one question at a time, on two cores.

    python -m benchmarks.judge_speed --record
    python -m benchmarks.judge_speed frozen:minilm minilm mpnet smollm llamacpp:smollm gguf:FILE llamacpp:gguf:FILE

All judges are loaded into one process. Each question goes to all of them in turn, in an order that is turned round from
question to question, so that other work on the machine slows all of them alike: the figures to trust are the ratios,
each the median over pairs of neighbouring runs. Nothing that was trained is needed: the cost is that of the base.
`--record` writes what the tables of RESULTS.md show.
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

CORES, QUESTIONS, ANSWER = 2, 20, 64
REFERENCE = "smollm"
USUAL = ("frozen:minilm", "minilm", "mpnet", "smollm", "llamacpp:smollm")
FROZEN, LLAMACPP = "frozen:", "llamacpp:"
base_of = functools.cache(load_judge_base)  # two judges of one base need its weights once


@dataclass(frozen=True)
class Contestant:
    """A judge that can be asked. tokens: what it reads of a case."""

    ask: Callable[[Case], object]
    tokens: Callable[[Case], int] | None = None


@dataclass(frozen=True)
class Cost:
    """Medians over questions. ratio, core_ratio: how many times as long the reference takes, on the clock
    and in CPU time, by runs side by side."""

    ms: float
    core_ms: float
    ratio: float
    core_ratio: float
    tokens: float | None


def frozen(spec: str, scratch: Path) -> Contestant:
    embedder = SentenceEmbedder(spec.removeprefix(FROZEN))
    return Contestant(lambda case: text_features(embedder, [case.question], [case.texts["closed"]], ANSWER))


def encoder(spec: str, scratch: Path) -> Contestant:
    opened = PairEncoder(resolve_encoder(spec))
    opened.load_weights()

    def ids(case: Case) -> list[int]:
        return opened.encode(case.question.text, case.texts["closed"])

    return Contestant(lambda case: opened.predict_known([ids(case)]), lambda case: len(ids(case)))


def causal(spec: str, scratch: Path) -> Contestant:
    judge = CausalJudge(base_of(spec), ANSWER_LABELS)
    return Contestant(
        lambda case: judge.predict_known([judge.encode(text(case))]), lambda case: len(judge.encode(text(case)).ids)
    )


def by_llama_cpp(spec: str, scratch: Path) -> Contestant:
    """The base as `knowgate export-judge` writes it; a GGUF file as it is (llamacpp:gguf:FILE)."""
    base = base_of(spec.removeprefix(LLAMACPP))
    tokens, behind = scratch / f"{abs(hash(spec))}.json", find_gguf_file(spec.removeprefix(LLAMACPP))
    base.loaded.tokenizer.backend_tokenizer.save(str(tokens))
    file = behind if behind is not None and spec.startswith(f"{LLAMACPP}gguf:") else scratch / f"{tokens.stem}.gguf"
    if not file.is_file():
        write_gguf(file, base.loaded.model, base.loaded.tokenizer, number_format="q8_0", tokenizer_source=behind)
    judge, run = CausalJudge(base, ANSWER_LABELS), LlamaCppClassifier(file, tokens, CORES)
    pair = judge.label_tokens

    def ids(case: Case) -> list[int]:
        return judge.encode(text(case)).ids

    return Contestant(lambda case: run.score_token_pair(ids(case), pair), lambda case: len(ids(case)))


def text(case: Case) -> str:
    return build_correctness_prompt(case.question, case.texts["closed"])


def contestant(spec: str, scratch: Path) -> Contestant:
    kinds = {FROZEN: frozen, LLAMACPP: by_llama_cpp}
    found = next((open_ for start, open_ in kinds.items() if spec.startswith(start)), None)
    return (found or (encoder if is_encoder_spec(spec) else causal))(spec, scratch)


def race(judges: Mapping[str, Contestant], cases: Sequence[Case]) -> dict[str, list[tuple[float, float]]]:
    """Seconds on the clock and of all cores, for each judge and question.

    No question comes twice: llama.cpp would not read it again.
    """
    first, *others = cases
    for one in judges.values():
        one.ask(first)  # what the first call pays alone
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in judges}
    for number, case in enumerate(others):
        order = list(judges) if number % 2 else list(judges)[::-1]
        for name in order:
            clock, core = time.perf_counter(), time.process_time()
            judges[name].ask(case)
            times[name].append((time.perf_counter() - clock, time.process_time() - core))
        print(f"{number + 1} of {len(others)} questions", end="\r", flush=True)
    return times


def costs(
    times: Mapping[str, Sequence[tuple[float, float]]], judges: Mapping[str, Contestant], cases: Sequence[Case]
) -> dict[str, Cost]:
    reference = np.array(times[REFERENCE if REFERENCE in times else next(iter(times))]).T
    found = {}
    for name, pairs in times.items():
        clock, core = np.array(pairs).T
        size = judges[name].tokens
        read = None if size is None else round(float(np.mean([size(case) for case in cases])), 1)
        found[name] = Cost(
            round(1000 * float(np.median(clock)), 1),
            round(1000 * float(np.median(core)), 1),
            *(round(float(np.median(theirs / own)), 2) for theirs, own in zip(reference, (clock, core), strict=True)),
            read,
        )
    return found


def record(found: Mapping[str, Cost], questions: int, load: Iterable[float]) -> dict[str, object]:
    return {
        "judges": {name: asdict(cost) for name, cost in found.items()},
        "cores": CORES,
        "questions": questions,
        "reference": REFERENCE,
        "load": [round(value, 1) for value in load],
        "how": "one process, one question at a time, order turned round; medians. Where the load is above the cores, "
        "other work ran on them: ratios are of neighbouring runs and say more than the milliseconds.",
    }


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bases", nargs="*", help=f"as above; without: {', '.join(USUAL)}")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="how many are asked, each once")
    parser.add_argument("--record", action="store_true", help=f"write {JUDGES}/{SPEED}")
    options = parser.parse_args()
    torch.set_num_threads(CORES)
    tested = load_cases("test")
    cases = tested[:: len(tested) // (options.questions + 1)][: options.questions + 1]
    with tempfile.TemporaryDirectory() as scratch:
        judges = {spec: contestant(spec, Path(scratch)) for spec in options.bases or USUAL}
        found = costs(race(judges, cases), judges, cases)
    named = {named_by(spec): cost for spec, cost in found.items()}
    told = record(named, options.questions, os.getloadavg())
    if options.record:
        write_json(HOME / JUDGES / SPEED, told)
    print(json.dumps(told, indent=1))


def named_by(spec: str) -> str:
    """A file by its name, not by where it lies on this machine."""
    kind, gguf, file = spec.partition("gguf:")
    return f"{kind}{gguf}{Path(file).name}" if gguf else spec


if __name__ == "__main__":
    main()
