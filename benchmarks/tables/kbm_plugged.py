"""KBM's Table 4: a judge trained on one LLM decides for another, compared with that LLM's own judge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.tables.common import RUNS, Rows, format_at_threshold, load_test_run, table
from benchmarks.tables.names import OTHER_LLM, OWN_VERDICT

PAPER: Rows = [  # figures of the paper for the judge of Qwen2-7B
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
    """Render the section on judges plugged into another LLM."""
    rows = [line for run in sorted(RUNS.glob("*/*-test")) for line in _rows(run.parent.name, run)]
    if not rows:
        return
    yield "\n### Plugged into another LLM (Table 4)\n"
    yield (
        "A judge that learnt from one LLM decides for another by its own verdict: accuracy (retrieval rate) / random "
        'as often. A judge reads the question alone. AUROC: of "does not know", where 0.5 is chance. Llama-3.1-8B is graded by '
        "`contains` here; by its data set's own grades (page [policy](policy.md)) it has 32.8 and 38.4 %.\n"
    )
    yield table(COLUMNS, [*((*line, "–") for line in PAPER), *rows])


def _rows(llm: str, run: Path) -> Rows:
    """Return a row for each LLM whose judges decided on the run; no rows without a judge of another LLM."""
    name = run.name.removesuffix("-test")
    labels = load_test_run(llm, name)
    gates = [gate for gate in labels.recorded_needs if gate.startswith("kbm") and gate.endswith(OWN_VERDICT)]
    teachers = list(dict.fromkeys(_parse_teacher(gate) or llm for gate in gates))
    if not set(teachers) - {llm}:
        return []
    ends = (f"{100 * labels.closed_book_right.mean():.1f}", f"{100 * labels.retrieved_right.mean():.1f}")
    return [
        (
            llm,
            name,
            "itself" if teacher == llm else teacher,
            *ends,
            *(_cell(labels, _find_judge(labels, head, llm, teacher)) for head in HEADS),
            _cell(labels, "prompt"),
            _auroc_cell(labels, _find_judge(labels, "mastery", llm, teacher)),
        )
        for teacher in sorted(teachers, key=lambda teacher: teacher != llm)
    ]


def _parse_teacher(gate: str) -> str:
    """Return 'qwen' for 'kbm-certainty, of qwen, own verdict', and '' for a judge of the LLM itself."""
    return gate.removesuffix(OWN_VERDICT).partition(OTHER_LLM)[2]


def _find_judge(labels: Any, head: str, llm: str, teacher: str) -> str | None:
    """Return the recorded judge with this head that was trained on the teacher, or None."""
    gate = "kbm" if head == "mastery" else f"kbm-{head}"
    name = f"{gate}{'' if teacher == llm else OTHER_LLM + teacher}{OWN_VERDICT}"
    return name if name in labels.recorded_needs else None


def _cell(labels: Any, gate: str | None) -> str:
    from knowgate.errors import KnowgateError
    from knowgate.gates.offline_scoring import score_gate

    try:
        return format_at_threshold(labels, score_gate(labels, gate)) if gate else "–"
    except KnowgateError:  # The rows lack its signals.
        return "–"


def _auroc_cell(labels: Any, gate: str | None) -> str:
    from knowgate.gates.offline_scoring import score_gate
    from knowgate.papers.sweeps import format_auroc

    return format_auroc(labels, score_gate(labels, gate)) if gate else "–"
