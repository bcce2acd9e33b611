"""A small logistic regression in numpy, for gates that learn from the log while running."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knowgate.statistics import sigmoid
from knowgate.types import Vector

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Logistic:
    """p(y = 1 | x) = sigmoid(x . weights + bias)."""

    weights: Floats
    bias: float

    def predict(self, features: Vector) -> list[float]:
        logits = features @ self.weights + self.bias
        return [float(p) for p in sigmoid(logits)]


def fit_logistic(features: Vector, truth: NDArray[np.bool_], penalty: float = 1.0, steps: int = 30) -> Logistic:
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
    return Logistic(w[:-1], float(w[-1]))
