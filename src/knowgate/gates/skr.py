"""SKR: did retrieval help or hurt the nearest logged questions?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from knowgate.data.history.entries import HistoryScope, HistoryStore, RetrievalOutcome
from knowgate.errors import BadSetting
from knowgate.gates.history_scope import bind_scope, open_history_store
from knowgate.stats.logistic import sigmoid
from knowgate.types import Gate, ModelIdentity, Neighbor, Question, Reading, Vector

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LogisticModel:
    """p(y = 1 | x) = sigmoid(x . weights + bias)."""

    weights: Floats
    bias: float

    def predict(self, features: Vector) -> list[float]:
        logits = features @ self.weights + self.bias
        return [float(p) for p in sigmoid(logits)]


def fit_logistic(features: Vector, truth: NDArray[np.bool_], penalty: float = 1.0, steps: int = 30) -> LogisticModel:
    """Newton's method on the L2-penalised likelihood; the bias is not penalised. Converges in a few steps."""
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


TIE_NEED = 0.5 + 1e-6  # just above the threshold: ties retrieve (SKR section 3.3)
PRIOR_WEIGHT = 1.0  # of the smooth vote: one half-hearted neighbour on either side
MIN_EXAMPLES = 5  # of each kind, below which a classifier is a guess
SEARCH_FACTOR = 5  # neighbours fetched per neighbour used, as those with outcome 'same' are left out


@dataclass(frozen=True)
class SkrGate(Gate):
    """need = share of the k nearest logged questions for which retrieval made the answer right.

    Neighbors for which it changed nothing are left out. vote: the paper's majority (need 0 or 1, ties retrieve);
    smooth, the default and ours: neighbours count by similarity and trust, need anywhere in [0, 1], so that there is a
    threshold to choose; classifier: a logistic regression on the embedding, fitted to the whole log (the paper's second
    variant, there a BERT). What has expired counts in none of them.

    Needs: nothing. Of the LLM, that is: it works on a black box. Cost per question: one embedding and a search.
    Reference: Wang et al. 2023 (SKR), section 3.3.
    Example:
        >>> near = (Neighbor("a", "unknown", 0.9, "better"), Neighbor("b", "known", 0.8, "worse"))
        >>> SkrGate(mode="vote").score([Question("?")], [Reading(neighbors={"skr": near})])[0] > 0.5
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

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        scope = bind_scope(self.history, model.fingerprint, prompts, self.tenant, self.embedder)
        classifier = (
            fit_classifier(open_history_store(self.history, self.embedder), scope)
            if self.mode == "classifier"
            else None
        )
        return replace(self, scope=scope, classifier=classifier)

    def find_neighbors(self, questions: Sequence[Question]) -> list[tuple[Neighbor, ...]]:
        """The k nearest for which retrieval made a difference."""
        if self.scope is None:
            raise BadSetting("skr: bind the gate to its model first (AdaptiveRAG does).")
        nearest = open_history_store(self.history, self.embedder).search(
            [q.text for q in questions], self.k * SEARCH_FACTOR, self.scope
        )
        telling = [
            [n for n in near if n.outcome in (RetrievalOutcome.BETTER, RetrievalOutcome.WORSE)] for near in nearest
        ]
        return [tuple(near[: self.k]) for near in telling]

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        if self.classifier is not None:
            asked = [question.text for question in questions]
            return (
                self.classifier.predict(open_history_store(self.history, self.embedder).embed(asked)) if asked else []
            )
        count = majority_vote if self.mode == "vote" else smooth_vote
        return [count(reading.neighbors[self.name]) for reading in readings]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        return [
            f"retrieval helped {sum(n.outcome == RetrievalOutcome.BETTER for n in near)} and hurt "
            f"{sum(n.outcome == RetrievalOutcome.WORSE for n in near)} of the logged questions nearest to it"
            for near in (reading.neighbors[self.name] for reading in readings)
        ]


def fit_classifier(store: HistoryStore, scope: HistoryScope) -> LogisticModel:
    """A classifier of better against worse over all logged questions."""
    outcomes, vectors = store.outcomes(scope)
    telling = np.array(
        [outcome in (RetrievalOutcome.BETTER, RetrievalOutcome.WORSE) for outcome in outcomes], dtype=bool
    )
    truth = np.array([outcome == RetrievalOutcome.BETTER for outcome in outcomes], dtype=bool)[telling]
    counts = (int(truth.sum()), int(len(truth) - truth.sum()))
    if min(counts) < MIN_EXAMPLES:
        raise BadSetting(
            f"skr: the classifier needs {MIN_EXAMPLES} logged questions that retrieval helped and {MIN_EXAMPLES} that it hurt; "
            f"the log has {counts[0]} and {counts[1]}. Use mode=smooth, or label more questions."
        )
    return fit_logistic(vectors[telling], truth)


def majority_vote(neighbors: Sequence[Neighbor]) -> float:
    """1 if more were helped than hurt, 0 if fewer; a tie, or nobody near, retrieves."""
    better = sum(neighbor.outcome == RetrievalOutcome.BETTER for neighbor in neighbors)
    worse = len(neighbors) - better
    return TIE_NEED if better == worse else float(better > worse)


def smooth_vote(neighbors: Sequence[Neighbor]) -> float:
    """Votes weighted by similarity and trust, drawn towards one half where there are few."""
    weights = [max(0.0, neighbor.similarity) * neighbor.weight for neighbor in neighbors]
    better = sum(w for w, n in zip(weights, neighbors, strict=True) if n.outcome == RetrievalOutcome.BETTER)
    return (better + PRIOR_WEIGHT / 2 + 1e-9) / (sum(weights) + PRIOR_WEIGHT)
