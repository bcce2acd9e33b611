"""DH-ICL: its variants, and what the LLM says of itself (KB-SAT)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from benchmarks.tables.common import RUNS, table


def variant_table() -> Iterator[str]:
    from knowgate.evaluation.sweeps import auroc_of
    from knowgate.gates import score_gate
    from knowgate.runs import load_trial

    run = RUNS / "qwen2.5-coder-1.5b" / "triviaqa_ctx-test"
    if not run.is_dir():
        return
    trial = load_trial([run], layers=())
    found: dict[str, dict[str, float]] = {}
    for name in trial.recorded:
        if name.startswith("dhicl:"):
            what, sign = name.removeprefix("dhicl:").split(",sign=")
            found.setdefault(what, {})[sign] = auroc_of(trial, score_gate(trial, name))
    yield "## DH-ICL: how many examples, which label words, which sign (Qwen, triviaqa_ctx)\n"
    yield 'AUROC of "does not know"; the log is the train run, 21 % known.\n'
    rows = [(what, *(f"{values[sign]:.3f}" for sign in ("none", "paper", "code"))) for what, values in found.items()]
    yield table(("variant", "not calibrated", "paper's sign", "code's sign"), rows)


def kbsat_table() -> Iterator[str]:
    file = RUNS / "kbsat-qwen2.5-coder-1.5b.json"
    if not file.is_file():
        return
    yield "## KB-SAT: does the LLM know what it knows? (Qwen)\n"
    yield (
        "Balanced: as many questions answered right as wrong, so 0.5 is chance. Swapped: known "
        "questions with an entity "
        "of another question (right: unknown). Rare: a rare word in front of known questions (right: known).\n"
    )
    rows = [
        (one["data"], one["set"], one["words"], one["method"], str(one["n"]), f"{one['accuracy']:.3f}",
         f"{one['predicted_known']} / {one['predicted_unknown']}",
         "–" if one["auroc"] is None else f"{one['auroc']:.3f}")
        for one in json.loads(file.read_text())
        if one["words"] == "true/false" or one["set"] == "balanced"
    ]  # fmt: skip
    yield table(("data set", "set", "words", "method", "n", "accuracy", "said known / unknown", "AUROC"), rows)
