"""SKR: did retrieval help or hurt the nearest logged questions?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np

from knowgate.errors import BadSetting
from knowgate.gates.parts.logged import bound_scope, opened
from knowgate.gates.parts.logistic import Logistic, fit_logistic
from knowgate.history import HistoryStore, Outcome, Scope
from knowgate.types import Gate, ModelIdentity, Neighbour, Question, Reading

TIE = 0.5 + 1e-6  # just above the threshold: ties retrieve (SKR section 3.3)
PRIOR = 1.0  # of the smooth vote: one half-hearted neighbour on either side
FEWEST = 5  # of each kind, below which a classifier is a guess
DEEPER = 5  # neighbours fetched per neighbour used, as those with outcome 'same' are left out


@dataclass(frozen=True)
class SkrGate(Gate):
    """need = share of the k nearest logged questions for which retrieval made the answer right.

    Neighbours for which it changed nothing are left out. vote: the paper's majority (need 0 or 1, ties retrieve);
    smooth, the default and ours: neighbours count by similarity and trust, need anywhere in [0, 1], so that there is a
    threshold to choose; classifier: a logistic regression on the embedding, fitted to the whole log (the paper's second
    variant, there a BERT). What has expired counts in none of them.

    Needs: nothing. Of the LLM, that is: it works on a black box. Cost per question: one embedding and a search.
    Reference: Wang et al. 2023 (SKR), section 3.3.
    Example:
        >>> near = (Neighbour("a", "unknown", 0.9, "better"), Neighbour("b", "known", 0.8, "worse"))
        >>> SkrGate(mode="vote").score([Question("?")], [Reading(neighbours={"skr": near})])[0] > 0.5
        True
    """

    history: str | HistoryStore = "history.db"
    k: int = 7
    mode: Literal["smooth", "vote", "classifier"] = "smooth"
    embedder: str | None = None
    tenant: str = ""
    scope: Scope | None = None
    classifier: Logistic | None = None

    def __post_init__(self) -> None:
        if self.k < 1:
            raise BadSetting(f"skr: k is {self.k}; it must be at least 1.")

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        scope = bound_scope(self.history, model.fingerprint, prompts, self.tenant, self.embedder)
        classifier = fitted(opened(self.history, self.embedder), scope) if self.mode == "classifier" else None
        return replace(self, scope=scope, classifier=classifier)

    def recall(self, questions: Sequence[Question]) -> list[tuple[Neighbour, ...]]:
        """The k nearest for which retrieval made a difference."""
        if self.scope is None:
            raise BadSetting("skr: bind the gate to its model first (AdaptiveRAG does).")
        nearest = opened(self.history, self.embedder).search([q.text for q in questions], self.k * DEEPER, self.scope)
        telling = [[n for n in near if n.outcome in (Outcome.BETTER, Outcome.WORSE)] for near in nearest]
        return [tuple(near[: self.k]) for near in telling]

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        if self.classifier is not None:
            asked = [question.text for question in questions]
            return self.classifier.predict(opened(self.history, self.embedder).embed(asked)) if asked else []
        count = majority if self.mode == "vote" else smooth
        return [count(reading.neighbours[self.name]) for reading in readings]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        return [
            f"retrieval helped {sum(n.outcome == Outcome.BETTER for n in near)} and hurt "
            f"{sum(n.outcome == Outcome.WORSE for n in near)} of the logged questions nearest to it"
            for near in (reading.neighbours[self.name] for reading in readings)
        ]


def fitted(store: HistoryStore, scope: Scope) -> Logistic:
    """A classifier of better against worse over all logged questions."""
    outcomes, vectors = store.outcomes(scope)
    telling = np.array([outcome in (Outcome.BETTER, Outcome.WORSE) for outcome in outcomes], dtype=bool)
    truth = np.array([outcome == Outcome.BETTER for outcome in outcomes], dtype=bool)[telling]
    counts = (int(truth.sum()), int(len(truth) - truth.sum()))
    if min(counts) < FEWEST:
        raise BadSetting(
            f"skr: the classifier needs {FEWEST} logged questions that retrieval helped and {FEWEST} that it hurt; "
            f"the log has {counts[0]} and {counts[1]}. Use mode=smooth, or label more questions."
        )
    return fit_logistic(vectors[telling], truth)


def majority(neighbours: Sequence[Neighbour]) -> float:
    """1 if more were helped than hurt, 0 if fewer; a tie, or nobody near, retrieves."""
    better = sum(neighbour.outcome == Outcome.BETTER for neighbour in neighbours)
    worse = len(neighbours) - better
    return TIE if better == worse else float(better > worse)


def smooth(neighbours: Sequence[Neighbour]) -> float:
    """Votes weighted by similarity and trust, drawn towards one half where there are few."""
    weights = [max(0.0, neighbour.similarity) * neighbour.weight for neighbour in neighbours]
    better = sum(w for w, n in zip(weights, neighbours, strict=True) if n.outcome == Outcome.BETTER)
    return (better + PRIOR / 2 + 1e-9) / (sum(weights) + PRIOR)
