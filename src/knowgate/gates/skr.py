"""The gate of SKR: retrieves if retrieval helped the most similar logged questions more often than it hurt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np

from knowgate.data.history.entries import HistoryScope, RetrievalOutcome
from knowgate.data.history.store import HistoryStore
from knowgate.errors import BadSetting
from knowgate.gates.history_scope import bind_scope, open_history_store
from knowgate.stats.metrics import BoolArray, FloatArray, sigmoid
from knowgate.types import Gate, ModelIdentity, Neighbor, Question, Reading, Vector

TIE_NEED = 0.5 + 1e-6  # just above the threshold: ties retrieve (SKR section 3.3)
PRIOR_WEIGHT = 1.0  # weight of the prior in the smooth vote, half for "helped" and half for "hurt"
MIN_EXAMPLES = 5  # questions of each outcome (helped, hurt) that a classifier needs
# Five times as many neighbors are fetched as used, because those whose answer did not change are dropped.
SEARCH_FACTOR = 5
DECISIVE_OUTCOMES = (RetrievalOutcome.BETTER, RetrievalOutcome.WORSE)


@dataclass(frozen=True)
class LogisticModel:
    """A logistic regression: p(y = 1 | x) = sigmoid(x . weights + bias)."""

    weights: FloatArray  # one per feature
    bias: float

    def predict(self, features: Vector) -> list[float]:
        """Return p(y = 1) for each row of features."""
        return [float(p) for p in sigmoid(features @ self.weights + self.bias)]


def fit_logistic(features: Vector, truth: BoolArray, penalty: float = 1.0, steps: int = 30) -> LogisticModel:
    """Fit a logistic regression with L2 regularization by Newton's method.

    Args:
        features: One row per example.
        truth: Label of each example.
        penalty: Strength of the regularization. The bias is not regularized.
        steps: Maximum number of Newton steps.
    """
    x = np.hstack([features.astype(np.float64), np.ones((len(features), 1))])  # the last column is for the bias
    ridge = np.diag([penalty] * features.shape[1] + [1e-6])  # the tiny last value keeps the matrix invertible
    weights = np.zeros(x.shape[1])
    for _ in range(steps):
        p = sigmoid(x @ weights)
        gradient = x.T @ (p - truth) + ridge @ weights
        hessian = (x * (p * (1 - p))[:, None]).T @ x + ridge
        step = np.linalg.solve(hessian, gradient)
        weights = weights - step
        if np.abs(step).max() < 1e-8:
            break
    return LogisticModel(weights[:-1], bias=float(weights[-1]))


@dataclass(frozen=True)
class SkrGate(Gate):
    """Retrieves if retrieval helped more of the k most similar logged questions (neighbors) than it hurt.

    The log records whether the LLM was right without and with passages. Questions with no difference are ignored. The
    mode 'smooth', the default, weights the neighbors by similarity and trust, and gives a need between 0 and 1. The mode
    'vote' is the majority vote of the paper; its need is 0 or 1, and ties retrieve. The mode 'classifier' is a logistic
    regression on the embedding of the question, fitted on the whole log.

    Needs: nothing. Works with any LLM. Cost per question: one embedding and one search in the log.
    Reference: Wang et al. 2023 (SKR), section 3.3.

    Example:
        >>> neighbors = (Neighbor("a", "unknown", 0.9, "better"), Neighbor("b", "known", 0.8, "worse"))
        >>> SkrGate(mode="vote").score([Question("?")], [Reading(neighbors={"skr": neighbors})])[0] > 0.5
        True
    """

    history: str | HistoryStore = "history.db"  # the log
    k: int = 7  # number of neighbors
    mode: Literal["smooth", "vote", "classifier"] = "smooth"
    embedder: str | None = None  # None for the embedding model of the log
    tenant: str = ""  # the tenant (customer) whose questions are used
    scope: HistoryScope | None = None  # set by `bind`
    classifier: LogisticModel | None = None  # only in the mode 'classifier'; set by `bind`

    def __post_init__(self) -> None:
        if self.k < 1:
            raise BadSetting(f"gate 'skr': k, the number of neighbors, is {self.k}, but it must be at least 1.")

    @property
    def _store(self) -> HistoryStore:
        """The open history log."""
        return open_history_store(self.history, self.embedder)

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """Return a copy with the logged questions of this LLM. Mode 'classifier' also fits the classifier."""
        scope = bind_scope(self.history, model.fingerprint, prompts, self.tenant, self.embedder)
        classifier = fit_classifier(self._store, scope) if self.mode == "classifier" else None
        return replace(self, scope=scope, classifier=classifier)

    def find_neighbors(self, questions: Sequence[Question]) -> list[tuple[Neighbor, ...]]:
        """Find for each question up to k similar logged questions whose answers retrieval made right or wrong."""
        if self.scope is None:
            raise BadSetting("gate 'skr' is not bound to a model. Call `bind` first, or use the gate in AdaptiveRAG.")
        texts = [question.text for question in questions]
        # Logged questions where retrieval changed nothing are dropped, so more than k are searched for.
        nearest = self._store.search(texts, self.k * SEARCH_FACTOR, self.scope)
        neighbors = []
        for candidates in nearest:
            changed = [candidate for candidate in candidates if candidate.outcome in DECISIVE_OUTCOMES]
            neighbors.append(tuple(changed[: self.k]))
        return neighbors

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Compute the need for retrieval with the classifier or by a vote of neighbors.

        Neighbors are similar logged questions.
        """
        if not questions:
            return []
        if self.classifier is not None:
            vectors = self._store.embed([question.text for question in questions])
            return self.classifier.predict(vectors)
        vote = majority_vote if self.mode == "vote" else smooth_vote
        return [vote(reading.neighbors[self.name]) for reading in readings]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Say how many similar logged questions retrieval helped and how many it hurt."""
        explanations = []
        for reading in readings:
            outcomes = [neighbor.outcome for neighbor in reading.neighbors[self.name]]
            n_helped, n_hurt = outcomes.count(RetrievalOutcome.BETTER), outcomes.count(RetrievalOutcome.WORSE)
            explanations.append(f"retrieval helped {n_helped} and hurt {n_hurt} of the nearest logged questions")
        return explanations


def fit_classifier(store: HistoryStore, scope: HistoryScope) -> LogisticModel:
    """Fit a classifier of question embeddings to predict whether retrieval helps.

    Questions with no difference are ignored.

    Raises:
        BadSetting: Fewer than `MIN_EXAMPLES` logged questions were helped, or hurt, by retrieval.
    """
    outcomes, vectors = store.outcomes(scope)
    is_decisive = np.array([outcome in DECISIVE_OUTCOMES for outcome in outcomes], dtype=bool)
    helped = np.array([outcome == RetrievalOutcome.BETTER for outcome in outcomes], dtype=bool)[is_decisive]
    n_helped, n_hurt = int(helped.sum()), int((~helped).sum())
    if min(n_helped, n_hurt) < MIN_EXAMPLES:
        raise BadSetting(
            f"gate 'skr' with mode=classifier needs {MIN_EXAMPLES} logged questions that retrieval helped and {MIN_EXAMPLES} "
            f"that it hurt. The log has {n_helped} helped and {n_hurt} hurt. Use skr:mode=smooth, or log more questions."
        )
    return fit_logistic(vectors[is_decisive], helped)


def majority_vote(neighbors: Sequence[Neighbor]) -> float:
    """Return 1 if retrieval helped most neighbors (similar logged questions), else 0. A tie gives just above 0.5."""
    n_helped = sum(neighbor.outcome == RetrievalOutcome.BETTER for neighbor in neighbors)
    n_hurt = len(neighbors) - n_helped  # neighbors that retrieval neither helped nor hurt are not passed
    return TIE_NEED if n_helped == n_hurt else float(n_helped > n_hurt)


def smooth_vote(neighbors: Sequence[Neighbor]) -> float:
    """Return the weighted share of neighbors (similar logged questions) helped by retrieval.

    With few neighbors, the result is near 0.5.
    """
    weights = [max(0.0, neighbor.similarity) * neighbor.weight for neighbor in neighbors]
    is_helped = [neighbor.outcome == RetrievalOutcome.BETTER for neighbor in neighbors]
    helped_weight = sum(weight for weight, helped in zip(weights, is_helped, strict=True) if helped)
    return (helped_weight + PRIOR_WEIGHT / 2 + 1e-9) / (sum(weights) + PRIOR_WEIGHT)  # 1e-9 makes ties retrieve
