"""The papers' systems on recorded answers of capable LLMs, where only texts are known: `python -m benchmarks.text_systems`.

    KNOWGATE_BENCH=... python -m benchmarks.text_systems --record    # embed the questions and write the record

Protocol, written before any test row was scored.

- Rows, grades and folds are those of the policy benchmark (`policy_protocol.md`). Train rows are scored out of fold: by
  models and neighbors of the other three folds. Test rows are scored with all train rows, once.
- *KBM*: the adapters of the policy benchmark after the question alone, P(closed-book answer right). *IK*: the same
  adapters after the closed-book answer. *KBM, text*: logistic regression on the MiniLM embedding of the question.
  *SKR*: of the 7 nearest train questions whose answer retrieval changed, the share that it turned right, smoothed by one
  neutral vote. *Adaptive-RAG*: logistic regression on the embedding of the question, no retrieval against the rest, on
  questions that either answer solves. *DH-ICL, neighbors*: the share of unknown questions among the 20 nearest train
  questions; the LLM itself cannot be asked.
- Each system is measured at its own cut (.5) and at a cut learned on train rows: the one with the most right answers
  there, the fewest searches among equals. Nothing is chosen on test rows.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.policy_predictions import ANSWER, CLOSED, QUESTION, fit_calibration, load_predictions
from benchmarks.policy_sets import RECORDED_SETS, read_recorded
from benchmarks.tables.common import HERE, Rows, table

HOME = HERE / "runs" / "text-systems"
POLICY = HERE / "runs" / "policy"
SETS = ("gpt4_nq", "chatgpt_nq", "davinci3_nq", "gpt3_realtimeqa", "llama3_8b")
SKR_NEIGHBORS, LOG_NEIGHBORS = 7, 20
RESAMPLED = 2_000
FINDINGS = (
    "What this shows. A better LLM does not make these systems better: what a capable LLM knows of NQ can hardly be read "
    "off the question (AUROC .55 to .63), and somewhat better off its answer (IK, .62 to .69). The papers' cut of .5 asks "
    "whether the LLM knows, not whether a search helps: where the LLM knows two thirds, KBM, Adaptive-RAG and the "
    "neighbors skip nearly everything and lose the whole gain of searching. IK gains 1.3 points over never at 5 % of the "
    "searches of GPT-4. SKR, which learns from what retrieval changed, is the only one whose own cut of .5 is close to "
    "the better constant everywhere on NQ. Llama-3.1-8B is asked six kinds of questions, which can be told apart: AUROC .66 "
    "from the text of the question, .75 and .77 with adapters. At either cut, KBM and IK skip about a fifth of its searches "
    "and lose about half a point; at the learned cut, the interval includes zero. A cut "
    "learned for right answers falls back to always: where search is this "
    "good, no text system finds enough questions to skip. For policies with a bound on searches see "
    "[policy](policy.md).\n"
)
TEST_FOLD = -1
SYSTEMS = ("KBM", "IK", "KBM, text", "SKR", "Adaptive-RAG", "DH-ICL, neighbors")


# --- scores -----------------------------------------------------------------------------------------


def score_out_of_fold(folds: Any, score: Callable[[Any, Any], Any]) -> Any:
    """Score train rows by the rows of other folds, and test rows by all train rows.

    Args:
        folds: Fold of each row; -1 for test rows. Rows of any other negative fold are left at 0.5 and never learned from.
        score: Returns the needs of the second rows, learned from the first ones (both as numbers of rows).
    """
    needs = np.full(len(folds), 0.5)
    for fold in (TEST_FOLD, *range(int(folds.max()) + 1)):
        scored = np.flatnonzero(folds == fold)
        needs[scored] = score(np.flatnonzero((folds >= 0) & (folds != fold)), scored)
    return needs


def score_systems(questions: Any, closed: Any, opened: Any, folds: Any) -> dict[str, Any]:
    """Return the needs of every system that reads texts only.

    Args:
        questions: Embeddings of the questions, unit length.
        closed: Whether the closed-book answer is right.
        opened: Whether the open-book answer is right.
        folds: Fold of each row; -1 for test rows.
    """
    changed, solved = closed != opened, closed | opened

    def kbm_text(train: Any, scored: Any) -> Any:
        return _fit(questions[train], ~closed[train])(questions[scored])

    def adaptive(train: Any, scored: Any) -> Any:
        train = train[solved[train]]
        return _fit(questions[train], ~closed[train])(questions[scored])

    def skr(train: Any, scored: Any) -> Any:
        train = train[changed[train]]
        near = _nearest(questions[scored], questions[train], SKR_NEIGHBORS)
        return (opened[train][near].sum(axis=1) + 0.5) / (near.shape[1] + 1)

    def neighbors(train: Any, scored: Any) -> Any:
        return (~closed[train])[_nearest(questions[scored], questions[train], LOG_NEIGHBORS)].mean(axis=1)

    systems = {"KBM, text": kbm_text, "SKR": skr, "Adaptive-RAG": adaptive, "DH-ICL, neighbors": neighbors}
    return {name: score_out_of_fold(folds, score) for name, score in systems.items()}


def _fit(features: Any, needed: Any) -> Callable[[Any], Any]:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=1.0, max_iter=1_000).fit(features, needed)
    return lambda rows: model.predict_proba(rows)[:, 1]


def _nearest(rows: Any, train: Any, k: int) -> Any:
    """Return the numbers of the k most similar train rows of each row, the most similar first."""
    return np.argsort(-(rows @ train.T), axis=1, kind="stable")[:, :k]


# --- the record -------------------------------------------------------------------------------------


def write_record(bench: Path, name: str, embed: Callable[[list[str]], Any]) -> None:
    """Score the rows of a recorded set and write ids and needs."""
    rows = {(row.id, row.split): row for row in read_recorded(bench, name)}
    with gzip.open(POLICY / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    kept = [rows[record["id"], "test" if record["fold"] == TEST_FOLD else "train"] for record in records]
    columns = [np.array([bool(record[key]) for record in records]) for key in ("closed", "open")]
    needs = score_systems(embed([row.question for row in kept]), *columns, load_predictions(name).folds)
    HOME.mkdir(exist_ok=True)
    with gzip.GzipFile(HOME / f"{name}.jsonl.gz", "wb", mtime=0) as file:
        for number, record in enumerate(records):
            values = {system: round(float(column[number]), 4) for system, column in needs.items()}
            file.write((json.dumps({"id": record["id"], **values}) + "\n").encode())


@cache
def load_needs(name: str) -> dict[str, Any]:
    """Load the needs of every system on the rows of a recorded set."""
    with gzip.open(HOME / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    known = fit_calibration(name).apply(load_predictions(name).logits)
    adapters = {"KBM": 1 - known[:, QUESTION, CLOSED], "IK": 1 - known[:, ANSWER, CLOSED]}
    return {
        system: adapters.get(system, np.array([record.get(system, 0.5) for record in records])) for system in SYSTEMS
    }


# --- the table --------------------------------------------------------------------------------------


def learn_cut(needs: Any, closed: Any, opened: Any) -> float:
    """Return the cut with the most right answers, the highest of equals; it may be "never" or "always"."""
    cuts = np.concatenate([[1.0], np.sort(np.unique(needs))[::-1], [-1.0]])
    right = [np.where(needs > cut, opened, closed).sum() for cut in cuts]
    return float(cuts[int(np.argmax(right))])


def measure(name: str, system: str) -> tuple[str, ...]:
    """Return the cells of a line: AUROC, at the cut of .5, at the learned cut, and against the better constant."""
    from knowgate.stats.metrics import auroc

    rows, needs = load_predictions(name), load_needs(name)[system]
    train, test = rows.folds >= 0, rows.folds == TEST_FOLD
    cut = learn_cut(needs[train], rows.closed[train], rows.open[train])
    closed, opened, scores = rows.closed[test], rows.open[test], needs[test]
    constant = opened if opened.mean() >= closed.mean() else closed
    right = np.where(scores > cut, opened, closed)
    gaps = right.astype(float) - constant
    drawn = np.random.default_rng(0).integers(0, len(gaps), (RESAMPLED, len(gaps)))
    low, high = 100 * np.quantile(gaps[drawn].mean(axis=1), [0.025, 0.975])
    cells = (_decided(closed, opened, scores > value) for value in (0.5, cut))
    change = f"{100 * gaps.mean():+.1f} [{low:+.1f}, {high:+.1f}]"
    return (f"{auroc(~closed, scores):.3f}", *cells, change)


def _decided(closed: Any, opened: Any, retrieve: Any) -> str:
    rate = float(retrieve.mean())
    random = rate * opened.mean() + (1 - rate) * closed.mean()
    return f"{100 * np.where(retrieve, opened, closed).mean():.1f} ({100 * rate:.0f} %) / {100 * random:.1f}"


def systems_tables() -> Iterator[str]:
    """The page of the papers' systems on recorded answers of capable LLMs."""
    available = [name for name in SETS if (HOME / f"{name}.jsonl.gz").is_file()]
    if not available:
        return
    yield "## The papers' systems on recorded answers of capable LLMs\n"
    yield (
        "The papers' claims are about LLMs that know half of what they are asked. These do. Only texts are recorded, so "
        "systems that need probabilities or hidden states of the LLM are missing. KBM and IK are LoRA adapters of "
        "Qwen2.5-Coder-1.5B, fitted on each LLM's train rows; the others read MiniLM embeddings. Accuracy (retrieval "
        "rate) / random as often, at the cut of .5 and at a cut learned on train rows; the last column compares the "
        "learned cut with the better of never and always, paired 95 % bootstrap interval. Test rows were scored once; "
        "the protocol is in `benchmarks/text_systems.py`. The open-book answers to NQ are Bing Chat's for all three "
        "LLMs.\n"
    )
    lines: Rows = []
    for name in available:
        test = load_predictions(name).test
        ends = f"{100 * test.closed.mean():.1f} / {100 * test.open.mean():.1f} / {100 * (test.closed | test.open).mean():.1f}"
        lines += [(RECORDED_SETS[name].llm, ends, system, *measure(name, system)) for system in SYSTEMS]
    columns = (
        "LLM",
        "never / always / oracle",
        "system",
        "AUROC",
        "at .5",
        "learned cut",
        "against the better constant",
    )
    yield table(columns, lines)
    yield "\n" + FINDINGS


def main() -> None:
    """Print the table, or write the record first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="embed the texts and write the record")
    if parser.parse_args().record:
        from knowgate.retrieval.embeddings import SentenceEmbedder

        embed = cache_embeddings(SentenceEmbedder(device="cpu").embed)
        for name in SETS:
            write_record(Path(os.environ["KNOWGATE_BENCH"]), name, embed)
            print("recorded", name, flush=True)
    print("\n".join(systems_tables()))


def cache_embeddings(embed: Callable[[list[str]], Any]) -> Callable[[list[str]], Any]:
    """Embed each distinct text once, and scale it to unit length."""

    known: dict[str, Any] = {}

    def embed_new(texts: list[str]) -> Any:
        new = [text for text in dict.fromkeys(texts) if text not in known]
        if new:
            vectors = np.asarray(embed(new), dtype=np.float64)
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
            known.update(zip(new, vectors, strict=True))
        return np.array([known[text] for text in texts])

    return embed_new


if __name__ == "__main__":
    main()
