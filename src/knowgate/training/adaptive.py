"""Fitting Adaptive-RAG's classifier: the cheapest strategy that was right, from the question's embedding. No LLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from knowgate.data.runs.rows import LabelRow
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.adaptive import COMPLEXITY_CLASSES, predict_complexity
from knowgate.retrieval.embeddings import SentenceEmbedder, check_vectors
from knowgate.stats.metrics import FloatArray
from knowgate.training.examples import Examples
from knowgate.training.fit_function import ExampleRequirements, FitResult
from knowgate.types import Embedder, SignalRequest, Vector

C_GRID = (0.1, 1.0, 10.0, 100.0)  # scikit-learn's C, on unit vectors
Tensors = dict[str, NDArray[Any]]


def fit_adaptive(
    examples: Annotated[Examples, ExampleRequirements(weighs=True)], *, embedder: Embedder | None = None
) -> FitResult:
    """A multinomial logistic regression into no / one / multi; the strength that fits the dev split best."""
    chosen = embedder or SentenceEmbedder()
    classes = np.array(
        [COMPLEXITY_CLASSES.index(found) if (found := label_cheapest_strategy(row)) else -1 for row in examples.rows]
    )
    texts = [question.text for question in examples.questions]
    vectors = check_vectors(chosen.embed(texts), len(texts))
    tensors = _best(vectors, classes, examples)

    def raw(places: Sequence[int]) -> FloatArray:
        need: FloatArray = 1 - predict_complexity(tensors, vectors[list(places)])[:, 0]
        return need

    options = {"embedder": getattr(chosen, "spec", "minilm"), "embedder_fingerprint": chosen.fingerprint}
    return FitResult(
        "adaptive", options, frozenset(), SignalRequest(), tensors, raw, _notes(classes, vectors, tensors, examples)
    )


def label_cheapest_strategy(row: LabelRow) -> str | None:
    """The cheapest way that was right: no, one or multi; None where several rounds are on record and wrong too.

    Rows without an iterative answer (`label --iterative`, or `meta.acc_contains.ircot` of answers recorded elsewhere)
    leave to several rounds what one does not get. The paper labels questions that nothing gets right by their data set;
    here they are left out.
    """
    if row.closed and row.closed.correct:
        return "no"
    if row.open is None:
        raise BadSetting(f"row '{row.id}' has no open-book answer, which adaptive learns from: label with passages.")
    if row.open.correct:
        return "one"
    return None if is_iterative_correct(row) is False else "multi"


def is_iterative_correct(row: LabelRow) -> bool | None:
    """Whether several rounds got it right; None where nobody tried."""
    if row.iterative is not None:
        return bool(row.iterative.correct)
    recorded = row.meta.get("acc_contains")
    found = recorded.get("ircot") if isinstance(recorded, dict) else None
    return found if isinstance(found, bool) else None


def _best(vectors: Vector, classes: NDArray[np.int64], examples: Examples) -> Tensors:
    train, dev = (part[classes[part] >= 0] for part in (examples.split.train, examples.split.dev))
    if len(set(classes[train])) < 2 or "no" not in (COMPLEXITY_CLASSES[c] for c in classes[train]):
        raise BadInput(
            "adaptive needs questions answered right without retrieval and others that were not. Label more."
        )
    weights = examples.weights_of(train)
    tried = [_fitted(vectors[train], classes[train], strength, weights) for strength in C_GRID]
    return max(tried, key=lambda tensors: _likelihood(tensors, vectors[dev], classes[dev]))


def _fitted(vectors: Vector, classes: NDArray[np.int64], strength: float, weights: FloatArray | None) -> Tensors:
    from sklearn.linear_model import LogisticRegression

    made = LogisticRegression(C=strength, max_iter=2000).fit(vectors, classes, weights)
    weight, bias = (
        np.zeros((len(COMPLEXITY_CLASSES), vectors.shape[1]), np.float32),
        np.zeros(len(COMPLEXITY_CLASSES), np.float32),
    )
    if len(made.classes_) == 2:  # one row of weights, for the second class against the first
        weight[made.classes_[1]], bias[made.classes_[1]] = made.coef_[0], made.intercept_[0]
    else:
        weight[made.classes_], bias[made.classes_] = made.coef_, made.intercept_
    seen = np.isin(np.arange(len(COMPLEXITY_CLASSES)), made.classes_).astype(np.float32)
    return {"weight": weight, "bias": bias, "seen": seen}


def _likelihood(tensors: Tensors, vectors: Vector, classes: NDArray[np.int64]) -> float:
    """Mean log-probability of the right class; with no dev rows all are equal."""
    if not len(classes):
        return 0.0
    found = predict_complexity(tensors, vectors)[np.arange(len(classes)), classes]
    return float(np.log(np.maximum(found, 1e-9)).mean())


def _notes(classes: NDArray[np.int64], vectors: Vector, tensors: Tensors, examples: Examples) -> list[str]:
    counts = ", ".join(f"{name} {int((classes == number).sum())}" for number, name in enumerate(COMPLEXITY_CLASSES))
    notes = [f"cheapest strategy that was right: {counts}; left out, as nothing was right: {int((classes < 0).sum())}"]
    notes += _tried(examples.rows)
    test = examples.split.test[classes[examples.split.test] >= 0]
    if len(test):
        right = float((predict_complexity(tensors, vectors[test]).argmax(axis=1) == classes[test]).mean())
        most = float(np.bincount(classes[test]).max() / len(test))
        notes.append(f"accuracy of the three classes on the test split: {right:.3f} (always the commonest: {most:.3f})")
    return notes


def _tried(rows: Sequence[LabelRow]) -> list[str]:
    """What several rounds come to, where they were tried on every question; what stands for them, where not."""
    verdicts = [is_iterative_correct(row) for row in rows]
    if any(verdict is None for verdict in verdicts):
        return [
            f"{verdicts.count(None)} of {len(rows)} rows have no iterative answer: what one round does not get counts "
            "as several there. Label with --iterative to know."
        ]
    ways = {
        "closed-book": [bool(row.closed and row.closed.correct) for row in rows],
        "with one round of retrieval": [bool(row.open and row.open.correct) for row in rows],
        "with several": [bool(verdict) for verdict in verdicts],
    }
    return ["answers right: " + ", ".join(f"{sum(got) / len(rows):.1%} {way}" for way, got in ways.items())]
