"""CBDR: headlines beside ours, beta on the recorded probes, and the tables of rerankers made where the LLM was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.tables.common import CHOICE, OPEN, QWEN, RUNS, Rows, decided, table, trial_of

PROBES = ("probe, balanced", "probe")  # the paper's, and until it is on record the one trained on all rows
PAPER_BETA = {0.95: "66.1 (83 %)", 0.98: "67.8 (93 %)"}  # Table 3: NQ, top 3, aligned reranker; always: 66.9


def cbdr_section() -> Iterator[str]:
    yield "## CBDR, beside the paper\n"
    yield from _headlines()
    yield from _betas()
    yield from _rerank_table()


def _headlines() -> Iterator[str]:
    """P@1 and right answers of the reranker aligned by confidence, as the paper has it."""
    file = next(
        (one for one in (RUNS / "cbdr" / "rerank.json", RUNS / "cbdr-nq" / "rerank.json") if one.is_file()), None
    )
    if file is None:
        return
    found = json.loads(file.read_text())
    ranked = found["rankings"]["confidence"]
    first = ranked["values"]["P@1"]
    rows: Rows = [
        (
            "P@1, base to aligned (Table 1)", "86.0 to 91.2",
            f"{_percent(first['base'])} to {_percent(first['aligned-confidence'])}, n = {ranked['questions']}; "
            f"in random order {100 * ranked['chance']:.1f}",
        )
    ]  # fmt: skip
    for top, paper in (("top 1", "61.5 to 62.6"), ("top 3", "62.2 to 66.9")):
        ours = [f"{one['data'].partition(':')[2]}: {_alignment(one, top)}" for one in found["answers"]]
        rows.append((f"right answers, {top}, NQ, Llama3-8B (Table 2)", paper, "; ".join(ours)))
    yield table(("headline", "paper", "here"), rows)
    yield (
        "\nWhy they differ: the paper's base is bge-reranker-v2-m3 (568M), ours the packaged MiniLM taught "
        "relevance; its LLM has 8B parameters, ours 1.5B, whose confidence rises with almost any passage: in random "
        "order most first passages already count as positive, so alignment by confidence has little to learn and costs "
        "relevance. Likelihood of the gold answer is the source that helps here; the paper itself finds no gain with "
        "Qwen2.5-7B.\n"
    )


def _percent(value: dict[str, float]) -> str:
    return f"{100 * value['value']:.1f}"


def _alignment(answers: dict[str, Any], top: str) -> str:
    values = answers["values"][top]
    best = max((name for name in values if name.startswith("aligned-")), key=lambda name: values[name]["value"])
    told = f"{_percent(values['base'])} to {_percent(values['aligned-confidence'])}"
    return f"{told} (by {best.removeprefix('aligned-')} {_percent(values[best])})"


def _betas() -> Iterator[str]:
    """Accuracy (retrieval rate) where confidence is not above beta, on the runs themselves (BM25, no reranker)."""
    from knowgate.evaluation.beta_table import unsure
    from knowgate.evaluation.sweeps import BETAS
    from knowgate.gates import score_gate

    found = {}
    for name in (*OPEN, *CHOICE):
        trial = trial_of(QWEN, name)
        probe = next((one for one in PROBES if trial is not None and one in trial.recorded), None)
        if probe is not None and trial.open_right is not None:
            found[name] = (trial, score_gate(trial, probe))
    if not found:
        return
    raw = all(scores.raw is not None for _, scores in found.values())
    yield "\n### Answer directly where confidence is above beta\n"
    yield (
        f"Confidence is {'the raw softmax of the balanced probe' if raw else '1 - calibrated need of the probe'}; "
        "BM25, no reranker. The paper's column is NQ, top 3, with its aligned reranker (Table 3; always 66.9), whose "
        "LLM answers 17 % of the questions above .95.\n"
    )
    rows: Rows = [
        (f"{beta:g}", PAPER_BETA.get(beta, "–"), *(decided(trial, unsure(one, beta)) for trial, one in found.values()))
        for beta in BETAS
    ]
    yield table(("beta", "paper", *found), rows)


def _rerank_table() -> Iterator[str]:
    """CBDR's tables as `benchmarks/cbdr.py` left them; until then, those of a short run on the embedded model."""
    folder = RUNS / "cbdr"
    if not (folder / "rerank.md").is_file():
        yield from _nq_table(RUNS / "cbdr-nq")
        yield from _short_table(RUNS / "rerank.md")
        return
    preferred = json.loads((folder / "pref-confidence-train.pref.json").read_text())
    relevance = json.loads((folder / "relevance.relevance.json").read_text())
    settings, counts = preferred["settings"], preferred["totals"]
    yield "\n### Rerankers aligned with an LLM, and confidence-based retrieval\n"
    yield (
        f"Recorded by `benchmarks/cbdr.py`: {settings['model']}, {settings['candidates']} candidates of the pooled "
        f"corpora by {settings['retriever']}; preferences of {counts['done']:,} training questions "
        f"({counts['kept']:,} have passages of both kinds by confidence). The base is {relevance['base']}, taught "
        f"relevance by {relevance['losses']['groups']:,} questions; `unread` is aligned by confidence without being "
        "shown the question, `aligned-cut` on passages of one length. 95 % bootstrap intervals over questions; "
        "differences are paired.\n"
    )
    yield _deeper(folder / "rerank.md")
    yield "### Beta, reranker and passages shown (CBDR, Table 3)\n"
    yield _deeper(folder / "beta.md")


def _nq_table(folder: Path) -> Iterator[str]:
    """The part of it that was recorded on NQ alone: three sources, without beta and without the controls."""
    if not folder.is_dir():
        return
    about = json.loads((folder / "about.json").read_text())
    learnt = "; ".join(
        f"{source}: {one['of_both_kinds']:,} of {one['questions']:,} have passages of both kinds"
        for source, one in about["preferences"].items()
    )
    yield "\n### Rerankers aligned with an LLM, NQ\n"
    yield (
        f"The first part of `benchmarks/cbdr.py`: {about['model']}, {about['candidates']} candidates of the pooled "
        f"corpora by {about['retriever']}; the base is the packaged MiniLM, taught relevance by "
        f"{about['relevance_questions']:,} questions of four data sets; aligned on NQ and TriviaQA ({learnt}). "
        "Controls, HotpotQA and Table 3 are not recorded yet, and benefit had fewer questions to learn from. "
        "95 % bootstrap intervals over questions; differences are paired.\n"
    )
    yield _deeper(folder / "rerank.md")


def _short_table(file: Path) -> Iterator[str]:
    if file.is_file():
        yield "\n### Reranker aligned with the LLM's confidence\n"
        yield "A short run on preferences made with `knowgate prefer`; `benchmarks/cbdr.py` is the whole of it.\n"
        lines = file.read_text().splitlines()[2:]  # without its own title
        yield _under("\n".join(lines), "##") + "\n"


def _deeper(file: Path) -> str:
    """Its titles one level down, as they stand within a section."""
    return _under(file.read_text(), "#")


def _under(text: str, more: str) -> str:
    return "\n".join(f"{more}{line}" if line.startswith("#") else line for line in text.splitlines()) + "\n"


def matrices() -> Iterator[str]:
    file = RUNS / "matrices.md"
    if file.is_file():
        yield "## Fitted on one data set or LLM, used on another\n"
        yield file.read_text()
