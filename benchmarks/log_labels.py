"""What a log of questions is worth (docs/dh-icl.md): labels by agreement against gold ones, and embeddings.

    python -m benchmarks.log_labels [--embedders]

Agreement needs the recorded runs alone. --embedders also needs KNOWGATE_BENCH (the runs hold no questions) and the
weights of mpnet and m3e (`knowgate models pull mpnet m3e`), and takes minutes.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.tables.common import DATA, QWEN, RUNS

PAIRS = (("webqa_zh_ctx", ("minilm", "m3e")), ("triviaqa_ctx", ("minilm", "mpnet")))
NEAR = (20, 5)


def graded(name: str, part: str) -> list[Any]:
    """Rows with a verdict."""
    from knowgate.data.runs.folder import RunFolder

    rows = RunFolder(RUNS / QWEN / f"{name}-{part}").rows()
    return [row for row in rows if row.error is None and row.closed and row.closed.correct is not None]


def agreement() -> None:
    """How often 'both answers are the same' equals 'the closed-book answer is right'."""
    from knowgate.data.runs.storage import question_from_row
    from knowgate.data.signals.samples import canonical_answer

    for name in DATA:
        rows = [row for row in graded(name, "test") if row.open is not None]
        right = np.array([bool(row.closed.correct) for row in rows])
        same = np.array(
            [
                canonical_answer(row.closed.text, question_from_row(row))
                == canonical_answer(row.open.text, question_from_row(row))
                for row in rows
            ]
        )
        known = f"{right[same].mean():.0%}" if same.any() else "none"
        print(f"{name}: the label is the gold one for {(same == right).mean():.0%}; of what agrees, {known} is known")


def embedders() -> None:
    """AUROC of 'does not know' by the share of known questions among the nearest logged ones."""
    from knowgate.data.questions import load_questions
    from knowgate.retrieval.embeddings import SentenceEmbedder
    from knowgate.stats.metrics import auroc

    for name, specs in PAIRS:
        parts = []
        for part in ("train", "test"):
            texts = {one.id: one.text for one in load_questions(f"bench:{name}/{part}")}
            rows = graded(name, part)
            parts.append(([texts[row.id] for row in rows], np.array([bool(row.closed.correct) for row in rows])))
        (logged, known), (asked, right) = parts
        for spec in specs:
            model = SentenceEmbedder(spec)
            order = np.argsort(-(model.embed(asked) @ model.embed(logged).T), axis=1)
            values = [f"{auroc(~right, 1 - known[order[:, :k]].mean(axis=1)):.3f} (k = {k})" for k in NEAR]
            print(f"{name}, {len(logged):,} logged, {spec}: {', '.join(values)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embedders", action="store_true")
    agreement()
    if parser.parse_args().embedders:
        embedders()


if __name__ == "__main__":
    main()
