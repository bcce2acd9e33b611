"""The page on the recorded runs: settings from their manifests, and seconds of trainings on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.paper_record import read_record
from benchmarks.tables.common import CHOICE, FRESH, MODELS, OPEN, RUNS, Rows, table

COLUMNS = ("LLM", "data set", "train", "test", "samples", "passages by", "k", "longest answer", "graded by", "made")

TRAININGS, ALIGNMENT = "papers/trainings.json", "cbdr/alignment/seconds.json"
SAMPLES, DHICL_PASSES = "papers/kbm30_seconds.json", "papers/dhicl_log.jsonl.gz"
TRAINING_TITLES = {
    "closed_book": "IK: answers to all questions, with hidden states",
    "ik_": "IK: one LoRA judge, 19,777 rows",
    "transfer_": "IK: one LoRA judge of a data set or of all, two epochs",
    "probes": "IK: six probes of hidden states",
    "kbm_1": "KBM: LoRA judge, one epoch of 14,471 rows",
}
ALIGNMENT_TITLES = {
    "relevance": "CBDR: base taught relevance, 5,057 questions",
    "label-": "CBDR: answers without passages",
    "prefer-benefit": "CBDR: preferences by benefit",
    "prefer-likelihood": "CBDR: preferences by likelihood",
    "fit-": "CBDR: one aligned reranker",
    "compare": "CBDR: comparison on test questions, with answers",
}
SAMPLES_TITLES = {
    "label-alone": "KBM: train questions of a data set, 30 samples",
    "label-with": "KBM: train questions of a data set, 30 samples without and 30 with passages",
    "probe-fit": "CBDR: mended probe of a data set",
}


def provenance_table() -> Iterator[str]:
    """Render the page on the recorded runs."""
    rows = [line for model in MODELS for name in (*OPEN, *CHOICE, FRESH) for line in _run_row(model, name)]
    if rows:
        yield "## The recorded runs\n"
        yield (
            "From the `run.json` of each test run. Passages by: the retriever with the fingerprint of its index; own: "
            "those the data set comes with. Multiple choice is graded by letter.\n"
        )
        yield table(COLUMNS, rows)
    yield "\n### Seconds on the GPU\n"
    yield (
        "Measured on one H200. Some steps ran beside each other; alone, each would be faster. A training that was interrupted "
        "and continued has the seconds of its last part on record, so it is left out. The GPU seconds of the test runs above "
        "were not recorded, and those of judges are in [judge](judge.md).\n"
    )
    yield table(("work", "parts", "seconds each", "record"), list_gpu_seconds())


def list_gpu_seconds() -> Rows:
    """List trainings and other steps on the GPU with the seconds that each of their parts took."""
    trainings = json.loads((RUNS / TRAININGS).read_text(encoding="utf-8"))
    uninterrupted = {
        name: facts["seconds"]
        for name, facts in trainings.items()
        if "seconds" in facts and "continued_after" not in facts and name != "transfer_untrained"
    }
    alignment = json.loads((RUNS / ALIGNMENT).read_text(encoding="utf-8"))
    groups = [(title, uninterrupted, prefix, TRAININGS) for prefix, title in TRAINING_TITLES.items()]
    groups += [(title, alignment, prefix, ALIGNMENT) for prefix, title in ALIGNMENT_TITLES.items()]
    samples = json.loads((RUNS / SAMPLES).read_text(encoding="utf-8"))
    groups += [(title, samples, prefix, SAMPLES) for prefix, title in SAMPLES_TITLES.items()]
    passes = read_record(RUNS / DHICL_PASSES)[0]["seconds"]
    groups.append(("DH-ICL: one pass over up to 1,092 questions with a growing log", passes, "", DHICL_PASSES))
    rows: Rows = []
    for title, steps, prefix, record in groups:
        seconds = sorted(value for step, value in steps.items() if step.startswith(prefix))
        ends = dict.fromkeys(f"{value:.0f}" for value in (seconds[0], seconds[-1]))
        rows.append((title, str(len(seconds)), " to ".join(ends), f"[{Path(record).name}](../runs/{record})"))
    return rows


def _run_row(model: str, name: str) -> Rows:
    test = _read_manifest(RUNS / model / f"{name}-test")
    if test is None:
        return []
    train, settings = _read_manifest(RUNS / model / f"{name}-train"), test["settings"]
    return [
        (
            model, name, "–" if train is None else str(train["settings"]["questions"]), str(settings["questions"]),
            str(settings["samples"]), _describe_passages(settings), str(settings.get("k") or "–"), str(settings["max_tokens"]),
            settings["grader"], str(test["started"])[:10],
        )
    ]  # fmt: skip


def _read_manifest(run: Path) -> dict[str, Any] | None:
    from knowgate.data.runs.folder import RunFolder

    return RunFolder(run).manifest() if run.is_dir() else None


def _describe_passages(settings: dict[str, Any]) -> str:
    if not settings.get("open_book", True):
        return "–"
    fingerprint = settings.get("retriever_fingerprint")
    if fingerprint:
        return f"{settings['retriever']} ({fingerprint})"
    retriever = str(settings["data"]).partition("+")[2]  # It added the passages to the questions.
    return f"{retriever}, top 3 (its index was not recorded)" if retriever else "own"
