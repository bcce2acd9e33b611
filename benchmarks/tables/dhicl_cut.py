"""DH-ICL with a learned cut: why retrieval rises with k and depends on label words, and how many logged questions are known.

The needs of this log's questions were not recorded, so no cut can be learned from it; `dhicl_log.py` learns cuts from
another log. Here, each half of the test questions is decided by the cut with the best balanced accuracy on the other half.
Only whether a question is known is used, as in a log. No question takes part in choosing its own cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.tables.common import QWEN, RUNS, SMOLLM, Rows, format_decisions, table

DATA_SET = "triviaqa_ctx"
LOG_SETS = ("triviaqa_ctx", "nq_ctx", "squad_ctx", "hotpotqa_ctx", "webqa_zh_ctx", "openbookqa")


def cut_tables(runs: dict[str, Any]) -> Iterator[str]:
    """Render every variant on TriviaQA at the cut of the paper and at a learned cut."""
    labels = runs.get(DATA_SET)
    if labels is None:
        return
    yield f"\n### The paper's cut of .5 and a learned cut ({DATA_SET})\n"
    yield (
        "Learned: the cut with the best balanced accuracy (known or not) on the other half of the test questions, so no "
        "question chooses its own cut, but the cut fits this data set. The tables above learn it from a log, as `knowgate "
        "sweep dhicl --learn-cut N` does. Median: of the need. Cells: accuracy (retrieval rate), then balanced "
        "accuracy of the verdict.\n"
    )
    columns = ("variant", "AUROC", "median", "at .5", "balanced", "learned cut", "balanced")
    yield table(columns, [_cut_line(labels, name) for name in _list_variants(labels)])


def _list_variants(labels: Any) -> list[str]:
    """List the variants: numbers of examples first, then label words."""
    names = [name for name in labels.recorded_needs if name == "dhicl" or name.startswith(("dhicl:k=", "dhicl:words="))]
    return sorted(names, key=lambda name: ("words" in name, _count_examples(name), name))


def _count_examples(name: str) -> int:
    return int(name.partition("k=")[2] or 20)


def _cut_line(labels: Any, name: str) -> tuple[str, ...]:
    from knowgate.gates.offline_scoring import score_gate
    from knowgate.papers.dhicl_tables import compute_balanced_accuracy
    from knowgate.papers.sweeps import format_auroc

    scores = score_gate(labels, name)
    needs = np.asarray(scores.needs)
    learned = decide_by_learned_cut(needs, labels.closed_book_right)
    title = "dhicl: k=20, words=true/false" if name == "dhicl" else name
    cells = [
        cell
        for retrieve in (needs > 0.5, learned)
        for cell in (
            format_decisions(labels, retrieve, with_random=False),
            f"{compute_balanced_accuracy(retrieve, labels.closed_book_right):.3f}",
        )
    ]
    return (title, format_auroc(labels, scores), f"{np.median(needs):.2f}", *cells)


def decide_by_learned_cut(needs: Any, known: Any) -> Any:
    """Decide each half of the questions by the cut with the best balanced accuracy on the other half."""
    from knowgate.papers.dhicl_tables import find_best_cut

    half = np.arange(len(needs)) % 2 == 0
    retrieve = np.zeros(len(needs), dtype=bool)
    for decided_half in (half, ~half):
        cut = find_best_cut(needs[~decided_half], known[~decided_half])
        retrieve[decided_half] = needs[decided_half] > cut
    return retrieve


# --- known questions in a log -----------------------------------------------------------------------


def log_table() -> Iterator[str]:
    """Render how many questions would be known in a log of each data set's train rows."""
    rows: Rows = [line for model in (QWEN, SMOLLM) for name in LOG_SETS for line in _log_line(model, name)]
    if rows:
        yield "\n### Known questions of a log\n"
        yield (
            "The paper's rule calls a question known if ten of ten samples are right. The samples of the log itself were "
            "not recorded; these are the train rows of each data set (samples at temperature 1, which is stricter than "
            "the .6 of the log). A log of an LLM that knows little has few known examples to show.\n"
        )
        yield table(("LLM", "data set", "rows", "samples", "greedy answer right", "half right", "all right"), rows)


def _log_line(model: str, name: str) -> Rows:
    from knowgate.data.runs.folder import RunFolder

    run = RUNS / model / f"{name}-train"
    if not run.is_dir():
        return []
    folder = RunFolder(run)
    rows = [row.closed for row in folder.rows() if row.closed is not None and row.closed.mastery is not None]
    mastery = np.array([answer.mastery for answer in rows], dtype=float)
    shares = (np.mean([bool(answer.correct) for answer in rows]), (mastery >= 0.5).mean(), (mastery >= 1).mean())
    samples = str(folder.manifest()["settings"]["samples"])
    return [(model, name, str(len(rows)), samples, *(f"{100 * share:.1f} %" for share in shares))]
