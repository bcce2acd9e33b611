"""KBM's Table 4: a judge that learnt from one LLM decides for another, beside that LLM's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.tables.common import RUNS, Rows, at_threshold, table, trial_of
from benchmarks.tables.names import ANOTHER, OWN

PAPER: Rows = [  # of the judge of Qwen2-7B
    ("GPT-4 (paper)", "WebQA", "Qwen2-7B", "64.3", "90.0",
     "85.7 (57 %) / 78.5", "89.5 (90 %) / 87.8", "69.5 (14 %) / 68.0"),
    ("Qwen2-72B (paper)", "WebQA", "Qwen2-7B", "83.7", "91.9",
     "91.4 (57 %) / 88.2", "91.8 (90 %) / 91.3", "87.9 (22 %) / 85.6"),
    ("Llama3-70B (paper)", "WebQA", "Qwen2-7B", "48.7", "90.9",
     "77.9 (57 %) / 72.6", "88.2 (90 %) / 86.7", "59.7 (16 %) / 55.3"),
    ("GPT-4o (paper)", "NaturalQA", "Qwen2-7B", "55.6", "60.1",
     "60.6 (86 %) / 60.4", "60.7 (98 %) / 60.5", "55.7 (18 %) / 56.6"),
    ("Qwen2-72B (paper)", "NaturalQA", "Qwen2-7B", "42.7", "59.4",
     "58.5 (86 %) / 56.5", "59.3 (98 %) / 58.9", "54.7 (51 %) / 52.6"),
    ("Llama3-70B (paper)", "NaturalQA", "Qwen2-7B", "47.2", "60.2",
     "59.6 (86 %) / 58.6", "60.2 (98 %) / 59.7", "59.2 (47 %) / 58.6"),
]  # fmt: skip
HEADS = ("mastery", "certainty")
COLUMNS = ("LLM", "data set", "judge of", "LLM only", "all RAG", *HEADS, "prompt", "AUROC of mastery")


def plugged_section() -> Iterator[str]:
    rows = [line for run in sorted(RUNS.glob("*/*-test")) for line in _lines(run.parent.name, run)]
    if not rows:
        return
    yield "\n### Plugged into another LLM (Table 4)\n"
    yield (
        "A judge that learnt from one LLM decides for another by its own verdict: accuracy (retrieval rate) / random "
        'as often. A judge reads the question alone. AUROC: of "does not know", where 0.5 is chance.\n'
    )
    yield table(COLUMNS, [*((*line, "–") for line in PAPER), *rows])


def _lines(llm: str, run: Path) -> Rows:
    """A line for each LLM whose judges were asked about the run; none where no foreign one was."""
    name = run.name.removesuffix("-test")
    trial = trial_of(llm, name)
    asked = [gate for gate in trial.recorded_needs if gate.startswith("kbm") and gate.endswith(OWN)]
    teachers = list(dict.fromkeys(_teacher(gate) or llm for gate in asked))
    if not set(teachers) - {llm}:
        return []
    ends = (f"{100 * trial.closed_right.mean():.1f}", f"{100 * trial.always_right.mean():.1f}")
    return [
        (
            llm,
            name,
            "itself" if teacher == llm else teacher,
            *ends,
            *(_cell(trial, _judge(trial, head, llm, teacher)) for head in HEADS),
            _cell(trial, "prompt"),
            _ranked(trial, _judge(trial, "mastery", llm, teacher)),
        )
        for teacher in sorted(teachers, key=lambda one: one != llm)
    ]


def _teacher(gate: str) -> str:
    """'kbm-certainty, of qwen, own verdict' -> 'qwen'; '' for a judge of the LLM itself."""
    return gate.removesuffix(OWN).partition(ANOTHER)[2]


def _judge(trial: Any, head: str, llm: str, teacher: str) -> str | None:
    """The gate on record that is this LLM's judge of this head."""
    called = "kbm" if head == "mastery" else f"kbm-{head}"
    name = f"{called}{'' if teacher == llm else ANOTHER + teacher}{OWN}"
    return name if name in trial.recorded_needs else None


def _cell(trial: Any, gate: str | None) -> str:
    from knowgate.errors import KnowgateError
    from knowgate.gates.offline_scoring import score_gate

    try:
        return at_threshold(trial, score_gate(trial, gate)) if gate else "–"
    except KnowgateError:  # the rows do not hold what it needs
        return "–"


def _ranked(trial: Any, gate: str | None) -> str:
    from knowgate.gates.offline_scoring import score_gate
    from knowgate.papers.sweeps import format_auroc

    return format_auroc(trial, score_gate(trial, gate)) if gate else "–"
