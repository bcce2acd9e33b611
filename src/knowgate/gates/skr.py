"""SKR: retrieve if retrieval helped the nearest logged questions more often than it hurt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np

from knowgate.data.history.entries import HistoryScope, HistoryStore, RetrievalOutcome
from knowgate.errors import BadSetting
from knowgate.gates.history_scope import bind_scope, open_history_store
from knowgate.stats.logistic import sigmoid
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.types import Gate, ModelIdentity, Neighbor, Question, Reading, Vector

TIE_NEED = 0.5 + 1e-6  # just above the threshold: ties retrieve (SKR section 3.3)
PRIOR_WEIGHT = 1.0  # of the smooth vote, shared by both outcomes
MIN_EXAMPLES = 5  # of each outcome, to fit a classifier
SEARCH_FACTOR = 5  # neighbors to fetch per neighbor used, because those with the outcome 'same' are dropped
DECISIVE_OUTCOMES = (RetrievalOutcome.BETTER, RetrievalOutcome.WORSE)


@dataclass(frozen=True)
class LogisticModel:
    """A logistic regression: p(y = 1 | x) = sigmoid(x . weights + bias)."""

    weights: FloatArray
    bias: float

    def predict(self, features: Vector) -> list[float]:
        """Predict p(y = 1) for each row."""
        return [float(p) for p in sigmoid(features @ self.weights + self.bias)]


def fit_logistic(features: Vector, truth: BoolArray, penalty: float = 1.0, steps: int = 30) -> LogisticModel:
    """Fit an L2-regularized logistic regression with Newton's method; the bias is not regularized."""
    x = np.hstack([features.astype(np.float64), np.ones((len(features), 1))])
    ridge = np.diag([penalty] * features.shape[1] + [1e-6])
    w = np.zeros(x.shape[1])
    for _ in range(steps):
        p = sigmoid(x @ w)
        gradient = x.T @ (p - truth) + ridge @ w
        step = np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + ridge, gradient)
        w = w - step
        if np.abs(step).max() < 1e-8:
            break
    return LogisticModel(w[:-1], float(w[-1]))


@dataclass(frozen=True)
class SkrGate(Gate):
    """Scores by what retrieval did to the k nearest logged questions: made the answer right, or wrong.

    Neighbors whose answer did not change are dropped, and so are expired ones. `mode='vote'` is the majority vote of
    the paper (need 0 or 1, ties retrieve). 'smooth', the default, weights neighbors by similarity and trust, so that
    the need is graded and a threshold can be chosen. 'classifier' is a logistic regression on the embedding, fitted on
    the whole log (the second variant of the paper, which uses BERT).

    Needs: nothing. Works with any LLM. Cost per question: one embedding and one search.
    Reference: Wang et al. 2023 (SKR), section 3.3.

    Example:
        >>> neighbors = (Neighbor("a", "unknown", 0.9, "better"), Neighbor("b", "known", 0.8, "worse"))
        >>> SkrGate(mode="vote").score([Question("?")], [Reading(neighbors={"skr": neighbors})])[0] > 0.5
        True
    """

    history: str | HistoryStore = "history.db"
    k: int = 7
    mode: Literal["smooth", "vote", "classifier"] = "smooth"
    embedder: str | None = None
    tenant: str = ""
    scope: HistoryScope | None = None
    classifier: LogisticModel | None = None

    def __post_init__(self) -> None:
        if self.k < 1:
            raise BadSetting(f"skr: k is {self.k}; it must be at least 1.")

    @property
    def _store(self) -> HistoryStore:
        """The open history log."""
        return open_history_store(self.history, self.embedder)

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """Bind the gate to the labels of this LLM in the log; fit the classifier if needed."""
        scope = bind_scope(self.history, model.fingerprint, prompts, self.tenant, self.embedder)
        classifier = fit_classifier(self._store, scope) if self.mode == "classifier" else None
        return replace(self, scope=scope, classifier=classifier)

    def find_neighbors(self, questions: Sequence[Question]) -> list[tuple[Neighbor, ...]]:
        """Find the k nearest logged questions for which retrieval made a difference."""
        if self.scope is None:
            raise BadSetting("skr: bind the gate to its model first (AdaptiveRAG does).")
        texts = [question.text for question in questions]
        nearest = self._store.search(texts, self.k * SEARCH_FACTOR, self.scope)
        return [tuple([n for n in neighbors if n.outcome in DECISIVE_OUTCOMES][: self.k]) for neighbors in nearest]

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Compute needs by vote or with the classifier."""
        if self.classifier is not None:
            return self.classifier.predict(self._store.embed([item.text for item in questions])) if questions else []
        vote = majority_vote if self.mode == "vote" else smooth_vote
        return [vote(reading.neighbors[self.name]) for reading in readings]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Count the neighbors that retrieval helped and hurt."""
        return [
            f"retrieval helped {sum(n.outcome == RetrievalOutcome.BETTER for n in neighbors)} and hurt "
            f"{sum(n.outcome == RetrievalOutcome.WORSE for n in neighbors)} of the nearest logged questions"
            for neighbors in (reading.neighbors[self.name] for reading in readings)
        ]


def fit_classifier(store: HistoryStore, scope: HistoryScope) -> LogisticModel:
    """Fit a classifier that predicts from a question's embedding whether retrieval helps or hurts."""
    outcomes, vectors = store.outcomes(scope)
    is_decisive = np.array([outcome in DECISIVE_OUTCOMES for outcome in outcomes], dtype=bool)
    helped = np.array([outcome == RetrievalOutcome.BETTER for outcome in outcomes], dtype=bool)[is_decisive]
    n_helped, n_hurt = int(helped.sum()), int((~helped).sum())
    if min(n_helped, n_hurt) < MIN_EXAMPLES:
        raise BadSetting(
            f"skr: the classifier needs {MIN_EXAMPLES} logged questions that retrieval helped and {MIN_EXAMPLES} that "
            f"it hurt; the log has {n_helped} and {n_hurt}. Use mode=smooth, or label more questions."
        )
    return fit_logistic(vectors[is_decisive], helped)


def majority_vote(neighbors: Sequence[Neighbor]) -> float:
    """Return 1 if retrieval helped more neighbors than it hurt, 0 if fewer; ties and no neighbors retrieve."""
    n_helped = sum(neighbor.outcome == RetrievalOutcome.BETTER for neighbor in neighbors)
    n_hurt = len(neighbors) - n_helped
    return TIE_NEED if n_helped == n_hurt else float(n_helped > n_hurt)


def smooth_vote(neighbors: Sequence[Neighbor]) -> float:
    """Return the share of helped neighbors, weighted by similarity and trust, with a prior of one half."""
    weights = [max(0.0, neighbor.similarity) * neighbor.weight for neighbor in neighbors]
    helped = sum(w for w, n in zip(weights, neighbors, strict=True) if n.outcome == RetrievalOutcome.BETTER)
    return (helped + PRIOR_WEIGHT / 2 + 1e-9) / (sum(weights) + PRIOR_WEIGHT)
