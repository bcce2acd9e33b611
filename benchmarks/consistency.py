"""How well the gate `consistency` ranks what an LLM knows, from committed label runs. Nothing is generated.

    python -m benchmarks.consistency [--json]
    python -m benchmarks.consistency --live 250     sample three answers of smollm to so many TriviaQA questions, with embeddings

The test runs hold, for each question, the certainty of thirty sampled answers: one minus the entropy of the distinct
normalized answers. The entropy tells how often each distinct answer occurred; if several solutions have the same entropy,
one of them is drawn. So three of the thirty answers can be drawn, and their agreement is that of `consistency:n=3` without
embedding similarity. The LLMs are local, but only sampled text is used, as with an API that returns text alone. Beside it
stand all thirty samples, and `logprob:min`, which needs log-probabilities.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.files import sha256_text
from knowgate.data.signals.samples import certainty
from knowgate.gates import load_gate
from knowgate.stats.bootstrap import estimate_auroc

RUNS = Path(__file__).parent / "runs"
LLMS = ("qwen2.5-coder-1.5b", "smollm")
DATA = ("nq_ctx-test", "triviaqa_ctx-test", "squad_ctx-test", "hotpotqa_ctx-test")
SAMPLES, DRAWN = 30, 3
LIVE_GATES = ("consistency", "consistency:embedder=none")


def list_partitions(n: int, largest: int) -> Iterator[tuple[int, ...]]:
    """List the ways to write n as a sum of positive numbers, largest first."""
    if n == 0:
        yield ()
    for first in range(min(n, largest), 0, -1):
        for rest in list_partitions(n - first, first):
            yield (first, *rest)


def index_partitions() -> dict[float, list[tuple[int, ...]]]:
    """Map the recorded certainty (six digits) to how often each distinct answer may have occurred."""
    index: dict[float, list[tuple[int, ...]]] = defaultdict(list)
    for counts in list_partitions(SAMPLES, SAMPLES):
        answers = [str(number) for number, count in enumerate(counts) for _ in range(count)]
        index[round(certainty(answers) or 0.0, 6)].append(counts)
    return index


def disagree(answers: list[int]) -> float:
    """Return the share of pairs of answers that differ: the need of the gate without embedding similarity."""
    pairs = list(combinations(answers, 2))
    return sum(a != b for a, b in pairs) / len(pairs)


def score_run(run: Path, partitions: dict[float, list[tuple[int, ...]]]) -> dict[str, Any]:
    """Score the rows of a label run: AUROC of "the closed-book answer is wrong"."""
    wrong: list[bool] = []
    needs: dict[str, list[float]] = {"consistency:n=3": [], "30 samples": [], "logprob:min": []}
    ambiguous = 0
    with gzip.open(run / "labels.jsonl.gz", "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            closed = row.get("closed") or {}
            if closed.get("correct") is None or closed.get("certainty") is None:
                continue
            solutions = partitions[round(closed["certainty"], 6)]
            ambiguous += len(solutions) > 1
            rng = np.random.default_rng(int(sha256_text("consistency", row["id"])[:8], 16))
            counts = solutions[int(rng.integers(len(solutions)))]
            answers = [number for number, count in enumerate(counts) for _ in range(count)]
            needs["consistency:n=3"].append(disagree(rng.choice(answers, DRAWN, replace=False).tolist()))
            needs["30 samples"].append(1 - closed["certainty"])
            needs["logprob:min"].append(-min((token[1] for token in closed["tokens"]), default=0.0))
            wrong.append(not closed["correct"])
    truth = np.array(wrong)
    agrees = np.array(needs["consistency:n=3"]) == 0
    scores = {name: estimate_auroc(truth, np.array(values), 1000) for name, values in needs.items()}
    return {
        "n": len(wrong),
        "ambiguous": ambiguous,
        "known": 1 - float(truth.mean()),
        "skipped": float(agrees.mean()),
        "known_of_skipped": 1 - float(truth[agrees].mean()) if agrees.any() else None,
        "auroc": {name: {"value": s.value, "low": s.low, "high": s.high} for name, s in scores.items()},
    }


def score_live(n: int) -> dict[str, Any]:
    """Sample three answers of the embedded LLM to n test questions and score the gate with and without embeddings."""
    from knowgate.data.questions import load_questions
    from knowgate.gates.scoring import bind_gate, read_questions
    from knowgate.models import load_model
    from knowgate.models.prompts.answers import AnswerPrompts

    with gzip.open(RUNS / "smollm" / "triviaqa_ctx-test" / "labels.jsonl.gz", "rt", encoding="utf-8") as file:
        known = {row["id"]: bool(row["closed"]["correct"]) for row in map(json.loads, file) if row.get("closed")}
    questions = [item for item in load_questions("bench:triviaqa_ctx/test") if item.id in known]
    questions = sorted(questions, key=lambda item: sha256_text("live", item.id))[:n]
    model, truth = load_model("smollm"), np.array([not known[item.id] for item in questions])
    gates = {name: bind_gate(load_gate(name), model, AnswerPrompts()) for name in LIVE_GATES}
    started = time.perf_counter()
    readings = read_questions(model, list(gates.values())[:1], questions, AnswerPrompts())
    seconds = {"samples": time.perf_counter() - started}
    results: dict[str, Any] = {"n": len(questions), "known": 1 - float(truth.mean())}
    for name, gate in gates.items():
        started = time.perf_counter()
        needs = np.array(gate.score(questions, readings))
        seconds[name] = time.perf_counter() - started
        score = estimate_auroc(truth, needs, 1000)
        results[name] = {
            "auroc": score.value,
            "low": score.low,
            "high": score.high,
            "skipped": float((needs <= 0.5).mean()),
        }
    return {**results, "ms_per_question": {name: 1000 * value / len(questions) for name, value in seconds.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--live", type=int, metavar="N", help="sample answers of smollm to N TriviaQA questions")
    options = parser.parse_args()
    if options.live:
        print(json.dumps(score_live(options.live)))
        return
    partitions = index_partitions()
    results = {llm: {data: score_run(RUNS / llm / data, partitions) for data in DATA} for llm in LLMS}
    if options.json:
        print(json.dumps(results))
        return
    print(
        "| LLM | data | n | known | consistency:n=3 | 30 samples | logprob:min | skips (all three agree) | known of these |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for llm, runs in results.items():
        for data, item in runs.items():
            aurocs = " | ".join(f"{score['value']:.3f}".removeprefix("0") for score in item["auroc"].values())
            known = "-" if item["known_of_skipped"] is None else f"{item['known_of_skipped']:.0%}"
            shares = f"{item['skipped']:.0%} | {known}"
            name = data.split("_")[0]
            print(f"| {llm} | {name} | {item['n']} | {item['known']:.0%} | {aurocs} | {shares} |")


if __name__ == "__main__":
    main()
