"""Fit Adaptive-RAG's classifier: predict the cheapest strategy that answers right from the question's embedding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from knowgate.data.runs.rows import LabelRow
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.adaptive import COMPLEXITY_CLASSES, predict_complexity
from knowgate.retrieval.embeddings import SentenceEmbedder, check_vectors
from knowgate.stats.metrics import FloatArray
from knowgate.training.classifiers import Tensors, fit_logistic
from knowgate.training.examples import Examples
from knowgate.training.fit_function import ExampleRequirements, FitResult
from knowgate.types import Embedder, SignalRequest, Vector

C_GRID = (0.1, 1.0, 10.0, 100.0)  # scikit-learn's C, on unit vectors
NO_CLASS = -1  # questions that no strategy answers right


def fit_adaptive(
    examples: Annotated[Examples, ExampleRequirements()], *, embedder: Embedder | None = None
) -> FitResult:
    """Fit the Adaptive-RAG gate: predict how many rounds of retrieval a question needs.

    The classifier reads the embedding of the question.
    """
    encoder = embedder or SentenceEmbedder()
    strategies = [label_cheapest_strategy(row) for row in examples.rows]
    classes = np.array([COMPLEXITY_CLASSES.index(name) if name else NO_CLASS for name in strategies])
    texts = [question.text for question in examples.questions]
    vectors = check_vectors(encoder.embed(texts), len(texts))
    tensors = _train_classifier(vectors, classes, examples)
    score_rows = partial(_score_rows, tensors, vectors)
    options = {"embedder": getattr(encoder, "spec", "minilm"), "embedder_fingerprint": encoder.fingerprint}
    notes = _describe_strategies(examples.rows, strategies)
    notes += _measure_accuracy(tensors, vectors, classes, examples)
    return FitResult("adaptive", options, frozenset(), SignalRequest(), tensors, score_rows, notes)


def _score_rows(tensors: Tensors, vectors: Vector, indices: Sequence[int]) -> FloatArray:
    """Return the probability that each of these questions needs at least one round of retrieval."""
    p_no_round = predict_complexity(tensors, vectors[list(indices)])[:, 0]  # the first of COMPLEXITY_CLASSES
    return np.asarray(1 - p_no_round)


def _describe_strategies(rows: Sequence[LabelRow], strategies: Sequence[str | None]) -> list[str]:
    """Describe for the model card how often each strategy is the cheapest one."""
    counts = ", ".join(f"{name} {strategies.count(name)}" for name in COMPLEXITY_CLASSES)
    notes = [f"cheapest strategy that was right: {counts}; left out, as nothing was right: {strategies.count(None)}"]
    n_unknown = sum(is_iterative_correct(row) is None for row in rows)
    if n_unknown:
        notes.append(
            f"{n_unknown} of {len(strategies)} rows have no iterative answer. In these rows, a question that one round of "
            "retrieval does not answer is assumed to need several rounds. Label with `iterative` to measure it."
        )
    return notes


def label_cheapest_strategy(row: LabelRow) -> str | None:
    """Return the cheapest strategy that answered a question right: 'no', 'one' or 'multi' rounds of retrieval.

    Returns:
        The strategy. None if all three failed; such questions are not used. (The paper labels them by their data set.)
        If several rounds were not tried, a question that one round does not answer counts as 'multi'.
    """
    if row.closed and row.closed.correct:
        return "no"
    if row.open is None:
        raise BadSetting(
            f"the gate 'adaptive' needs answers with passages, but question '{row.id}' has none. Label again with `index`."
        )
    if row.open.correct:
        return "one"
    have_all_failed = is_iterative_correct(row) is False
    return None if have_all_failed else "multi"


def is_iterative_correct(row: LabelRow) -> bool | None:
    """Return whether the answer after several rounds of retrieval is right. None means not tried."""
    if row.iterative is not None:
        return bool(row.iterative.correct)
    # The recorded answers of the paper's data set have their grades in this field. IRCoT retrieves in several rounds.
    grades = row.meta.get("acc_contains")
    correct = grades.get("ircot") if isinstance(grades, dict) else None
    return correct if isinstance(correct, bool) else None


def _train_classifier(vectors: Vector, classes: NDArray[np.int64], examples: Examples) -> Tensors:
    """Fit logistic regressions with several strengths of regularization; return the best one on the dev split.

    Raises:
        BadInput: The LLM answered all training questions right without passages (class "no"), or none.
    """
    train = _drop_unanswered(examples.split.train, classes)
    dev = _drop_unanswered(examples.split.dev, classes)
    present = {COMPLEXITY_CLASSES[number] for number in classes[train]}
    if len(present) < 2 or "no" not in present:
        raise BadInput(
            "the gate 'adaptive' learns from right and from wrong answers without passages. The recorded answers are all of "
            "one kind. Label more questions with `knowgate label`."
        )
    fits = [_fit_classes(vectors[train], classes[train], c) for c in C_GRID]
    return max(fits, key=lambda tensors: _mean_log_likelihood(tensors, vectors[dev], classes[dev]))


def _fit_classes(vectors: Vector, classes: NDArray[np.int64], c: float) -> Tensors:
    """Fit a logistic regression, and return its tensors.

    `c` is scikit-learn's C, the inverse of the regularization. The tensor `seen` is 0 for classes without training
    questions and 1 for the others.
    """
    fitted = fit_logistic(vectors, classes, C=c, max_iter=2000)
    n_classes = len(COMPLEXITY_CLASSES)
    weight = np.zeros((n_classes, vectors.shape[1]), np.float32)
    bias = np.zeros(n_classes, np.float32)
    # With two classes, scikit-learn has one row of weights, for the second class against the first.
    rows = fitted.classes_[1:] if len(fitted.classes_) == 2 else fitted.classes_
    weight[rows] = fitted.coef_
    bias[rows] = fitted.intercept_
    seen = np.isin(np.arange(n_classes), fitted.classes_).astype(np.float32)
    return {"weight": weight, "bias": bias, "seen": seen}


def _drop_unanswered(indices: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of those questions that some strategy answers right, so that they have a class."""
    return np.asarray(indices[classes[indices] != NO_CLASS])


def _mean_log_likelihood(tensors: Tensors, vectors: Vector, classes: NDArray[np.int64]) -> float:
    """Return the mean log-probability of the questions' true classes."""
    if not len(classes):
        return 0.0
    probabilities = predict_complexity(tensors, vectors)  # one row per question, one column per class
    true_class_probabilities = probabilities[np.arange(len(classes)), classes]
    return float(np.log(np.maximum(true_class_probabilities, 1e-9)).mean())


def _measure_accuracy(tensors: Tensors, vectors: Vector, classes: NDArray[np.int64], examples: Examples) -> list[str]:
    """Measure on the test split how often the predicted class is right.

    Returns:
        One note for the model card; empty without test questions.
    """
    test = _drop_unanswered(examples.split.test, classes)
    if not len(test):
        return []
    predicted = predict_complexity(tensors, vectors[test]).argmax(axis=1)
    accuracy = float((predicted == classes[test]).mean())
    majority = float(np.bincount(classes[test]).max() / len(test))
    return [f"accuracy of the three classes on the test split: {accuracy:.3f} (most frequent class: {majority:.3f})"]
