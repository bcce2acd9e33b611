"""Tables of the recorded judges by model size, by source of labels, and by number of training rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.judge_answers import HOME, JUDGES, Judge, read_judge
from benchmarks.tables.common import table
from benchmarks.tables.judge_speed import SPEED
from knowgate.stats.bootstrap import estimate_auroc
from knowgate.stats.metrics import compute_frontier

RATES = (0.75, 0.6, 0.5)
SIZES = {  # name of the predictions -> title, and name in the record of speed
    "judges": ("Qwen2.5-Coder-1.5B and mpnet together", None),
    "judge-1.5b": ("Qwen2.5-Coder-1.5B, LoRA", "gguf:qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
    "judge-135m": ("SmolLM2-135M, all weights", "smollm"),
    "judge-135m-lora": ("the same, LoRA", "smollm"),
    "distilled-135m": ("SmolLM2-135M, all weights, taught by the 1.5B judge", "smollm"),
    "judge-mpnet": ("mpnet, 110M, cross-encoder", "mpnet"),
    "distilled-mpnet": ("the same, taught by the 1.5B judge", "mpnet"),
    "unlabelled-mpnet": ("the same, from the 1.5B judge's word alone, no gold", "mpnet"),
    "judge-minilm": ("MiniLM, 22M, cross-encoder: `--base small`", "minilm"),
    "distilled-minilm": ("the same, taught by the 1.5B judge", "minilm"),
    "unlabelled-minilm": ("the same, from the 1.5B judge's word alone, no gold", "minilm"),
    "judge-frozen-minilm": ("MiniLM frozen, linear head", "frozen:minilm"),
}
LABELS = {
    "judge-1.5b": "gold answers",
    "agreed-1.5b": "share of two other ways (one retrieval, several) that give the same answer",
    "agree-1.5b": "memory and documents give the same answer (`--target agree`)",
    "implied-1.5b": "a judge LLM of 1.5B compares the two answers",
    "said-1.5b": "a judge LLM of 1.5B is asked whether the answer is right",
}
AMOUNTS = {
    "judge-1.5b-300": "300",
    "judge-1.5b-1000": "1,000",
    "judge-1.5b": "2,355 (all but the fifth that is held out)",
    "more-1.5b": "2,355, and 4,468 answers of another LLM",
    "question-1.5b": "2,355, shown the question alone",
}


def size_table(home: Path = HOME) -> str:
    """Render quality and CPU time per question, by model size."""
    file = home / JUDGES / SPEED
    costs = json.loads(file.read_text(encoding="utf-8"))["judges"] if file.is_file() else {}
    rows = [
        (name, *_format_quality(judge), _milliseconds(costs, spec))
        for key, (name, spec) in SIZES.items()
        if (judge := _read_if_recorded(home, key)) is not None
    ]
    rates = (f"right at {rate:.0%}" for rate in RATES)
    return table(("judge", "AUROC", *rates, "ms of CPU time"), rows).strip()


def label_table(home: Path = HOME) -> str:
    """Render the same judge trained with substitutes for gold labels, tested on gold labels."""
    return _render_judges(home, LABELS, "taught by")


def amount_table(home: Path = HOME) -> str:
    """Render the same judge by number of training rows."""
    return _render_judges(home, AMOUNTS, "rows it learnt from")


def _render_judges(home: Path, names: Mapping[str, str], title: str) -> str:
    rows = [
        (name, *_format_quality(judge))
        for key, name in names.items()
        if (judge := _read_if_recorded(home, key)) is not None
    ]
    return table((title, "AUROC", *(f"right at {rate:.0%}" for rate in RATES)), rows).strip()


def _read_if_recorded(home: Path, name: str) -> Judge | None:
    return read_judge(home, name) if (home / JUDGES / f"{name}.jsonl").is_file() else None


def _format_quality(judge: Judge) -> list[str]:
    """Return AUROC with its interval, and the share of right answers at each retrieval rate."""
    answers, known = judge.test.answers, judge.test.columns["known"]
    ranked = estimate_auroc(answers.closed, known)
    curve = compute_frontier(answers.closed, answers.open, 1 - known)
    auroc = f"{ranked.value or 0:.3f} [{ranked.low or 0:.3f}, {ranked.high or 0:.3f}]"
    return [auroc, *(f"{100 * curve.at(rate):.1f} %" for rate in RATES)]


def _milliseconds(costs: Mapping[str, Mapping[str, float]], spec: str | None) -> str:
    return f"{costs[spec]['core_ms']:,.0f}" if spec in costs else "-"
