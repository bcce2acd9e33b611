"""A judge for LLMs that it was not trained on: leave one LLM out.

    python -m benchmarks.any_llm_judge --json            print the committed results
    python -m benchmarks.any_llm_judge --run FOLDER      measure again (KNOWGATE_BENCH; FOLDER caches embeddings)

Protocol, written before any test row was scored:

1. Rows: recorded closed-book answers of Llama-3.1-8B (six data sets), GPT-4, ChatGPT and text-davinci-003 (NQ, graded by
   people), Qwen2.5-Coder-1.5B and SmolLM2-135M (the committed label runs of NQ, TriviaQA, SQuAD and HotpotQA). Variants
   without vectors use all rows. Variants with vectors use, per LLM, the 600 train and 400 test rows with the smallest hash
   of their question, so that two shared CPU cores are enough; the best variant without vectors is repeated on those rows.
2. For each LLM X, a head is trained on the train rows of the other five, without any question (after normalization) that
   X's test rows contain, and scored on X's test rows. So neither X nor a test question was seen in training.
3. Frozen MiniLM vectors of the question and of question + draft, features of the text (`benchmarks.draft_text`)
   and the popularity of words (ids in MiniLM's vocabulary, which is sorted by frequency). One logistic regression.
4. Choices (set of features, penalty, whether each LLM and data set has an intercept of its own in training) are made on
   train rows: train on the other five LLMs' train rows of half of the questions, score X's train rows of the other half.
   The variant with the highest smallest AUROC over the six LLMs is chosen; ties within .005 go to the smaller variant.
5. Quality is the AUROC of "the closed-book answer is wrong", averaged over the data sets of the left-out LLM; the AUROC
   over all its rows stands beside it. All variants are scored on the test rows once. The judge ships only if the chosen
   variant reaches .60 for each left-out LLM. Beside it stands the same head
   trained on the train rows of the LLM itself.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.draft_text import (
    ANSWER_FEATURES,
    DRAFT_FEATURES,
    HEDGING_FEATURES,
    LENGTH_FEATURES,
    answer_features,
)
from knowgate.core.files import sha256_text
from knowgate.core.text import normalize
from knowgate.data.signals.question_text import QUESTION_FEATURES
from knowgate.data.signals.vectors import truncate_words
from knowgate.retrieval.embeddings import SentenceEmbedder
from knowgate.stats.bootstrap import estimate_auroc
from knowgate.stats.metrics import auroc
from knowgate.types import Question

RESULTS = Path(__file__).parent / "runs" / "any-llm-judge.json"
RUNS = Path(__file__).parent / "runs"
RECORDED = {
    "Llama-3.1-8B": "gate_llama3_8b",
    "GPT-4": "gate_gpt4_nq",
    "ChatGPT": "gate_chatgpt_nq",
    "davinci-003": "gate_davinci3_nq",
}
LABELED = {"Qwen2.5-Coder-1.5B": "qwen2.5-coder-1.5b", "SmolLM2-135M": "smollm"}
LABELED_SETS = ("nq_ctx", "triviaqa_ctx", "squad_ctx", "hotpotqa_ctx")
LLMS = (*RECORDED, *LABELED)
SAMPLE_SIZES = {"train": 600, "test": 400}  # rows per LLM for variants with vectors
DRAFT_WORDS = 32
MIN_AUROC = 0.60
TOLERANCE = 0.005  # a smaller variant that is this close to the best on train rows is preferred
# C of the logistic regression (smaller is simpler), with and without the 768 numbers of the vectors.
PENALTIES = {True: (0.0003, 0.003), False: (0.1,)}
Matrix = NDArray[np.float64]
FEATURE_BLOCKS = {
    "question": QUESTION_FEATURES,
    "length": LENGTH_FEATURES,
    "hedging": HEDGING_FEATURES,
    "draft": DRAFT_FEATURES,
}


@dataclass(frozen=True)
class RecordedAnswer:
    """A closed-book answer of an LLM, and whether it is right."""

    llm: str
    dataset: str
    question: str
    draft: str
    known: bool

    @property
    def key(self) -> str:
        """The question in a form by which equal questions of different data sets are recognized."""
        return normalize(self.question)


# --- rows -----------------------------------------------------------------------------------------


def load_answers(split: str, *, sampled: bool) -> list[RecordedAnswer]:
    """Load the recorded answers of all LLMs in a split ('train' or 'test'), or a sample of each LLM's."""
    bench = Path(os.environ["KNOWGATE_BENCH"])
    recorded = [row for llm, name in RECORDED.items() for row in _read_recorded(llm, bench / name, split)]
    labeled = [
        row
        for llm, name in LABELED.items()
        for data in LABELED_SETS
        for row in _read_labeled(llm, RUNS / name / f"{data}-{split}", bench / data / f"{split}.jsonl.gz")
    ]
    if not sampled:
        return recorded + labeled
    rows = sorted(recorded + labeled, key=lambda row: sha256_text("sample", row.key))
    return [row for llm in LLMS for row in [row for row in rows if row.llm == llm][: SAMPLE_SIZES[split]]]


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def _read_recorded(llm: str, folder: Path, split: str) -> Iterator[RecordedAnswer]:
    """Read the recorded answers of one LLM from the benchmark folder."""
    for row in _read_lines(folder / f"{split}.jsonl.gz"):
        meta = row["meta"]
        known = (meta.get("correct") or meta["acc_contains"])["nor"]
        yield RecordedAnswer(llm, meta["dataset"], row["question"], meta["pred_no_retrieval"] or "", bool(known))


def _read_labeled(llm: str, run: Path, data: Path) -> Iterator[RecordedAnswer]:
    """Read the answers of a committed label run; its questions are in the benchmark folder."""
    questions = {row["id"]: row["question"] for row in _read_lines(data)}
    for row in _read_lines(run / "labels.jsonl.gz"):
        closed = row.get("closed") or {}
        if closed.get("correct") is not None:
            yield RecordedAnswer(
                llm, run.name.split("_")[0], questions[row["id"]], closed["text"], bool(closed["correct"])
            )


# --- features -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FeatureTable:
    """Rows with their features, in blocks that a variant can leave out."""

    rows: list[RecordedAnswer]
    blocks: dict[str, Matrix]

    def select(self, blocks: Sequence[str]) -> Matrix:
        """Return the columns of some blocks."""
        return np.hstack([self.blocks[name] for name in blocks])


def compute_features(rows: Sequence[RecordedAnswer], cache: Path | None) -> FeatureTable:
    """Compute the features of the rows. With a cache folder, also their embeddings."""
    questions = [Question(row.question) for row in rows]
    features = answer_features(questions, [row.draft for row in rows]).astype(np.float64)
    columns = {name: features[:, [i]] for i, name in enumerate(ANSWER_FEATURES)}
    blocks = {name: np.hstack([columns[item] for item in items]) for name, items in FEATURE_BLOCKS.items()}
    blocks["popularity"] = compute_popularity(rows)
    if cache is not None:
        with_drafts = [f"{row.question}\n{truncate_words(row.draft, DRAFT_WORDS)}" for row in rows]
        blocks["question vector"] = embed_cached([row.question for row in rows], cache)
        blocks["draft vector"] = embed_cached(with_drafts, cache)
    return FeatureTable(list(rows), blocks)


def embed_cached(texts: Sequence[str], cache: Path, chunk: int = 2048) -> Matrix:
    """Embed texts with MiniLM. Each distinct text is embedded once; chunks are kept in the folder."""
    distinct = sorted(set(texts), key=lambda text: (len(text), text))
    embedder, vectors = SentenceEmbedder("minilm"), []
    for start in range(0, len(distinct), chunk):
        part = distinct[start : start + chunk]
        file = cache / f"{sha256_text(*part)[:16]}.npy"
        if not file.exists():
            np.save(file, embedder.embed(part))
        vectors.append(np.load(file))
    index = {text: i for i, text in enumerate(distinct)}
    return np.concatenate(vectors)[[index[text] for text in texts]].astype(np.float64)


def compute_popularity(rows: Sequence[RecordedAnswer]) -> Matrix:
    """Compute how frequent the words are: mean and largest log id of MiniLM's vocabulary, and pieces per word."""
    from tokenizers import Tokenizer

    from knowgate.models.embedded_weights import fetch_weights

    tokenizer = Tokenizer.from_file(str(fetch_weights("minilm") / "tokenizer.json"))

    def describe(text: str) -> list[float]:
        ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids or [1000])
        logs = np.log(np.maximum(ids, 1000) / 1000)  # ids below 1000 are reserved
        return [float(logs.mean()), float(logs.max()), len(ids) / max(1, len(text.split()))]

    return np.array([describe(row.question) + describe(truncate_words(row.draft, DRAFT_WORDS)) for row in rows])


# --- variants -------------------------------------------------------------------------------------

TEXT = ("question", "length", "hedging", "draft")
VECTORS = ("question vector", "draft vector")
VARIANTS: dict[str, tuple[str, ...]] = {
    "question features": ("question",),
    "question features + popularity": ("question", "popularity"),
    "text features": TEXT,
    "text features without length and hedging": ("question", "draft"),
    "text features + popularity": (*TEXT, "popularity"),
    "question vector": ("question vector",),
    "vectors": VECTORS,
    "vectors + text features": (*VECTORS, *TEXT),
    "vectors + text features without length and hedging": (*VECTORS, "question", "draft"),
    "vectors + text features + popularity": (*VECTORS, *TEXT, "popularity"),
}


@dataclass(frozen=True)
class Setting:
    """What is chosen on train rows: a variant, its penalty, and whether LLMs and data sets have intercepts."""

    variant: str
    penalty: float
    intercepts: bool


@dataclass(frozen=True)
class Head:
    """A logistic regression on standardized features: the probability that the closed-book answer is wrong."""

    mean: Matrix
    scale: Matrix
    weights: Matrix
    bias: float

    def score(self, features: Matrix) -> Matrix:
        margins: Matrix = (features - self.mean) / self.scale @ self.weights + self.bias
        return margins


def fit_head(table: FeatureTable, use: NDArray[np.bool_], setting: Setting) -> Head:
    """Fit a head on some rows of a table. Every LLM has the same total weight."""
    from sklearn.linear_model import LogisticRegression

    rows = [row for row, used in zip(table.rows, use, strict=True) if used]
    features = table.select(VARIANTS[setting.variant])[use]
    mean, scale = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-6)
    inputs = (features - mean) / scale
    width = inputs.shape[1]
    if setting.intercepts:
        groups = sorted({(row.llm, row.dataset) for row in rows})
        # Large values leave these columns nearly without a penalty.
        dummies = np.array([[10.0 * ((row.llm, row.dataset) == group) for group in groups] for row in rows])
        inputs = np.hstack([inputs, dummies])
    counts = {llm: sum(row.llm == llm for row in rows) for llm in {row.llm for row in rows}}
    weights = np.array([len(rows) / len(counts) / counts[row.llm] for row in rows])
    wrong = np.array([not row.known for row in rows])
    model = LogisticRegression(C=setting.penalty, solver="newton-cholesky").fit(inputs, wrong, sample_weight=weights)
    bias = float(model.intercept_[0])
    if setting.intercepts:
        bias += float((inputs[:, width:] @ model.coef_[0][width:]).mean())
    return Head(mean, scale, model.coef_[0][:width], bias)


def measure(rows: Sequence[RecordedAnswer], scores: Matrix) -> dict[str, Any]:
    """Compute the AUROC of a left-out LLM: mean over its data sets, and over all its rows."""
    wrong, datasets = np.array([not row.known for row in rows]), np.array([row.dataset for row in rows])
    each = {str(name): auroc(wrong[datasets == name], scores[datasets == name]) for name in np.unique(datasets)}
    values = [value for value in each.values() if value is not None]
    return {"mean": float(np.mean(values)), "pooled": auroc(wrong, scores), "datasets": each, "n": len(rows)}


# --- protocol -------------------------------------------------------------------------------------


def try_settings(table: FeatureTable, variants: Sequence[str]) -> list[dict[str, Any]]:
    """Leave each LLM out on the train rows, with questions split in halves, for every setting (step 4)."""
    half = np.array([int(sha256_text("half", row.key)[:8], 16) % 2 == 0 for row in table.rows])
    llms, report = np.array([row.llm for row in table.rows]), []
    for variant in variants:
        features = table.select(VARIANTS[variant])
        for penalty, intercepts in product(PENALTIES[has_vectors(variant)], (False, True)):
            setting, aurocs = Setting(variant, penalty, intercepts), {}
            for llm in LLMS:
                test = (llms == llm) & half
                scores = fit_head(table, (llms != llm) & ~half, setting).score(features[test])
                aurocs[llm] = measure(select_rows(table, test), scores)["mean"]
            report.append({**asdict(setting), "auroc": aurocs, "least": min(aurocs.values())})
            print(f"{setting}: {[round(value, 3) for value in aurocs.values()]}", file=sys.stderr, flush=True)
    return report


def score_test_rows(train: FeatureTable, test: FeatureTable, setting: Setting, *, own: bool = False) -> dict[str, Any]:
    """Score a setting on the test rows of each left-out LLM (steps 2 and 5); `own` trains on that LLM instead."""
    llms = np.array([row.llm for row in train.rows])
    features, entry = test.select(VARIANTS[setting.variant]), {}
    for llm in LLMS:
        chosen = np.array([row.llm == llm for row in test.rows])
        rows = select_rows(test, chosen)
        seen = {row.key for row in rows}
        use = ((llms == llm) if own else (llms != llm)) & np.array([row.key not in seen for row in train.rows])
        scores = fit_head(train, use, setting).score(features[chosen])
        interval = estimate_auroc(np.array([not row.known for row in rows]), scores, 1000)
        entry[llm] = {**measure(rows, scores), "low": interval.low, "high": interval.high}
        entry[llm] |= {"known": float(np.mean([row.known for row in rows])), "trained_on": int(use.sum())}
    return {**asdict(setting), "llms": entry, "least": min(item["mean"] for item in entry.values())}


def select_rows(table: FeatureTable, use: NDArray[np.bool_]) -> list[RecordedAnswer]:
    """Return the rows that a mask selects."""
    return [row for row, used in zip(table.rows, use, strict=True) if used]


def has_vectors(variant: str) -> bool:
    """Return whether a variant reads embeddings, which are computed for a sample of the rows only."""
    return any(block.endswith("vector") for block in VARIANTS[variant])


def best_settings(report: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the best setting of each variant on the train rows."""
    best: dict[str, dict[str, Any]] = {}
    for entry in sorted(report, key=lambda entry: float(entry["least"])):
        best[entry["variant"]] = entry
    return best


def run(cache: Path) -> dict[str, Any]:
    """Run the whole protocol and return its results."""
    cache.mkdir(parents=True, exist_ok=True)
    full = {split: compute_features(load_answers(split, sampled=False), None) for split in SAMPLE_SIZES}
    sample = {split: compute_features(load_answers(split, sampled=True), cache) for split in SAMPLE_SIZES}
    tried = try_settings(full["train"], [name for name in VARIANTS if not has_vectors(name)])
    tried += try_settings(sample["train"], [name for name in VARIANTS if has_vectors(name)])
    best = best_settings(tried)
    top = max(entry["least"] for entry in best.values())
    order = list(VARIANTS)  # from small to large
    chosen = min((name for name in best if best[name]["least"] >= top - TOLERANCE), key=order.index)
    results = []
    for name, entry in best.items():
        rows = sample if has_vectors(name) else full
        setting = Setting(name, entry["penalty"], entry["intercepts"])
        results.append(
            {"rows": "sample" if has_vectors(name) else "all", **score_test_rows(rows["train"], rows["test"], setting)}
        )
    plain = max(
        (entry for entry in best.values() if not has_vectors(entry["variant"])), key=lambda entry: float(entry["least"])
    )
    repeated = Setting(plain["variant"], plain["penalty"], plain["intercepts"])
    results.append({"rows": "sample", **score_test_rows(sample["train"], sample["test"], repeated)})
    own = full if not has_vectors(chosen) else sample  # what the features are worth if the LLM is not left out
    setting = Setting(chosen, best[chosen]["penalty"], best[chosen]["intercepts"])
    rows_of_own = score_test_rows(own["train"], own["test"], setting, own=True)
    results.append({"rows": "own LLM's train", **rows_of_own})
    final = next(entry for entry in results if entry["variant"] == chosen)
    ships = bool(final["least"] >= MIN_AUROC)
    return {"chosen": chosen, "ships": ships, "minimum": MIN_AUROC, "test": results, "train": tried}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="measure again; cache embeddings in this folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if options.run:
        RESULTS.write_text(json.dumps(run(options.run), indent=1) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    print(json.dumps(results) if options.json else render_table(results))


def render_table(results: dict[str, Any]) -> str:
    """Render the test results as a Markdown table: one row per variant, one column per left-out LLM."""
    lines = [f"| features | {' | '.join(LLMS)} |", "|---" * (len(LLMS) + 1) + "|"]
    for entry in results["test"]:
        name = f"**{entry['variant']}**" if entry["variant"] == results["chosen"] else entry["variant"]
        cells = [f"{entry['llms'][llm]['mean']:.3f}".removeprefix("0") for llm in LLMS]
        lines.append(f"| {name} ({entry['rows']} rows) | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
