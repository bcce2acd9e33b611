"""The aligned reranker, and gates fitted on one data set or LLM and used on another: tables made where the LLM was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.tables.common import RUNS


def rerank_table() -> Iterator[str]:
    """CBDR's tables as `benchmarks/cbdr.py` left them; until then, those of a short run on the embedded model."""
    folder = RUNS / "cbdr"
    if not (folder / "rerank.md").is_file():
        yield from _nq_table(RUNS / "cbdr-nq")
        yield from _short_table(RUNS / "rerank.md")
        return
    preferred = json.loads((folder / "pref-confidence-train.pref.json").read_text())
    relevance = json.loads((folder / "relevance.relevance.json").read_text())
    settings, counts = preferred["settings"], preferred["totals"]
    yield "## Rerankers aligned with an LLM, and confidence-based retrieval (CBDR)\n"
    yield (
        f"Recorded by `benchmarks/cbdr.py`: {settings['model']}, {settings['candidates']} candidates of the pooled "
        f"corpora by {settings['retriever']}; preferences of {counts['done']:,} training questions "
        f"({counts['kept']:,} have passages of both kinds by confidence). The base is {relevance['base']}, taught "
        f"relevance by {relevance['losses']['groups']:,} questions; `unread` is aligned by confidence without being "
        "shown the question, `aligned-cut` on passages of one length. 95 % bootstrap intervals over questions; "
        "differences are paired.\n"
    )
    yield (folder / "rerank.md").read_text()
    yield "### Beta, reranker and passages shown (CBDR, Table 3)\n"
    yield (folder / "beta.md").read_text()


def _nq_table(folder: Path) -> Iterator[str]:
    """The part of it that was recorded on NQ alone: three sources, without beta and without the controls."""
    if not folder.is_dir():
        return
    about = json.loads((folder / "about.json").read_text())
    learnt = "; ".join(
        f"{source}: {one['of_both_kinds']:,} of {one['questions']:,} have passages of both kinds"
        for source, one in about["preferences"].items()
    )
    yield "## Rerankers aligned with an LLM (CBDR), NQ\n"
    yield (
        f"The first part of `benchmarks/cbdr.py`: {about['model']}, {about['candidates']} candidates of the pooled "
        f"corpora by {about['retriever']}; the base is the packaged MiniLM, taught relevance by "
        f"{about['relevance_questions']:,} questions of four data sets; aligned on NQ and TriviaQA ({learnt}). "
        "Controls, HotpotQA and Table 3 are not recorded yet, and benefit had fewer questions to learn from. "
        "95 % bootstrap intervals over questions; differences are paired.\n"
    )
    yield (folder / "rerank.md").read_text()


def _short_table(file: Path) -> Iterator[str]:
    if file.is_file():
        yield "## Reranker aligned with the LLM's confidence (CBDR)\n"
        yield "A short run on preferences made with `knowgate prefer`; `benchmarks/cbdr.py` is the whole of it.\n"
        lines = file.read_text().splitlines()[2:]  # without its own title
        yield "\n".join(f"#{line}" if line.startswith("##") else line for line in lines) + "\n"


def matrices() -> Iterator[str]:
    file = RUNS / "matrices.md"
    if file.is_file():
        yield "## Fitted on one data set or LLM, used on another\n"
        yield file.read_text()
