"""Measure how good labels by agreement are for a history log, and how good embedding models are (docs/dh-icl.md).

    python -m benchmarks.log_labels [--embedders]

Agreement needs only the recorded runs. `--embedders` takes minutes. It also needs the questions (KNOWGATE_BENCH), since the
recorded runs contain none, and the weights of mpnet and m3e (`knowgate models pull mpnet m3e`).
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.tables.common import DATA, QWEN, RUNS

EMBEDDERS = (("webqa_zh_ctx", ("minilm", "m3e")), ("triviaqa_ctx", ("minilm", "mpnet")))
NEIGHBORS = (20, 5)


def load_graded_rows(name: str, part: str) -> list[Any]:
    """Load the rows of a recorded run whose closed-book answer is graded.

    Args:
        name: Name of the data set.
        part: "train" or "test".
    """
    from knowgate.data.runs.folder import RunFolder

    rows = RunFolder(RUNS / QWEN / f"{name}-{part}").rows()
    return [row for row in rows if row.error is None and row.closed and row.closed.correct is not None]


def measure_agreement() -> None:
    """Print how often "both answers are the same" equals "the closed-book answer is right", by data set."""
    from knowgate.data.runs.storage import question_from_row
    from knowgate.data.signals.samples import canonical_answer

    for name in DATA:
        rows = [row for row in load_graded_rows(name, "test") if row.open is not None]
        right = np.array([bool(row.closed.correct) for row in rows])
        same = np.array(
            [
                canonical_answer(row.closed.text, question_from_row(row))
                == canonical_answer(row.open.text, question_from_row(row))
                for row in rows
            ]
        )
        known = f"{right[same].mean():.0%}" if same.any() else "none"
        print(
            f"{name}: label by agreement equals the gold label for {(same == right).mean():.0%} of the questions; "
            f"known among those that agree: {known}"
        )


def compare_embedders() -> None:
    """Print the AUROC for unknown questions of the share of known questions among the nearest neighbors."""
    from knowgate.data.questions import load_questions
    from knowgate.retrieval.embeddings import SentenceEmbedder
    from knowgate.stats.metrics import auroc

    for name, specs in EMBEDDERS:
        parts = []
        for part in ("train", "test"):
            texts = {question.id: question.text for question in load_questions(f"bench:{name}/{part}")}
            rows = load_graded_rows(name, part)
            parts.append(([texts[row.id] for row in rows], np.array([bool(row.closed.correct) for row in rows])))
        (logged, known), (queries, right) = parts
        for spec in specs:
            model = SentenceEmbedder(spec)
            order = np.argsort(-(model.embed(queries) @ model.embed(logged).T), axis=1)
            values = [f"{auroc(~right, 1 - known[order[:, :k]].mean(axis=1)):.3f} (k = {k})" for k in NEIGHBORS]
            print(f"{name}, {len(logged):,} logged, {spec}: {', '.join(values)}", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embedders", action="store_true", help="also compare embedding models")
    options = parser.parse_args()
    measure_agreement()
    if options.embedders:
        compare_embedders()


if __name__ == "__main__":
    main()
