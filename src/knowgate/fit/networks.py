"""Training the small classifiers that gates apply in numpy: the probe's (torch), a linear one (scikit-learn)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from knowgate.errors import BadInput
from knowgate.fit.metrics import Bools, auroc
from knowgate.gates.network import apply_network
from knowgate.types import Vector

SIZES = (512, 64, 32)  # CBDR section 3.1
DROPOUT, RATE, BATCH, EPOCHS = 0.5, 5e-5, 16, 30
SEEDS = (0, 42, 100)
PATIENCE = 6  # epochs without a better dev AUROC
Tensors = dict[str, NDArray[Any]]


def standardise(features: Vector) -> Tensors:
    """Mean and scale of the training rows; constant columns get scale 1."""
    if not np.isfinite(features).all():
        raise BadInput("the label runs hold NaN among their signals; label again.")
    scale = features.std(axis=0)
    return {
        "mean": features.mean(axis=0).astype(np.float32),
        "scale": np.where(scale < 1e-6, 1.0, scale).astype(np.float32),
    }


def fit_linear(features: Vector, needed: Bools, strength: float = 1.0) -> Tensors:
    """Regularised logistic regression on standardised features; `strength` is scikit-learn's C."""
    tensors = standardise(features)
    x = (features - tensors["mean"]) / tensors["scale"]
    with threadpool_limits(1):  # so small that threads only wait for each other
        fitted = LogisticRegression(C=strength, max_iter=500).fit(x, needed)
    tensors["0.0.weight"] = fitted.coef_.astype(np.float32)
    tensors["0.0.bias"] = fitted.intercept_.astype(np.float32)
    return tensors


def best_linear(features: Vector, needed: Bools, dev: Vector, dev_needed: Bools) -> Tensors:
    """The strength of regularisation that ranks the dev rows best."""
    tried = [fit_linear(features, needed, c) for c in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)]
    scores = [auroc(dev_needed, apply_network(tensors, dev)) or 0.5 for tensors in tried]
    return tried[int(np.argmax(scores))]


def fit_mlp(features: Vector, needed: Bools, dev: Vector, dev_needed: Bools, seeds: Sequence[int] = SEEDS) -> Tensors:
    """The paper's network, one member per seed, each at its best dev epoch. One softmax: the original has two."""
    tensors = standardise(features)
    for number, seed in enumerate(seeds):
        layers = _train(_scaled(features, tensors), needed, _scaled(dev, tensors), dev_needed, seed)
        for depth, (weight, bias) in enumerate(layers):
            tensors[f"{number}.{depth}.weight"], tensors[f"{number}.{depth}.bias"] = weight, bias
    return tensors


def _scaled(features: Vector, tensors: Tensors) -> Vector:
    scaled: Vector = ((features - tensors["mean"]) / tensors["scale"]).astype(np.float32)
    return scaled


def _train(
    x: Vector, needed: Bools, dev: Vector, dev_needed: Bools, seed: int
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # batches of 16: threads only wait for each other
    try:
        return _train_network(x, needed, dev, dev_needed, seed)
    finally:
        torch.set_num_threads(threads)


def _train_network(
    x: Vector, needed: Bools, dev: Vector, dev_needed: Bools, seed: int
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    sizes = (x.shape[1], *SIZES)
    parts: list[Any] = []
    for a, b in itertools.pairwise(sizes):
        parts += [nn.Linear(a, b), nn.ReLU(), nn.Dropout(DROPOUT)]
    network = nn.Sequential(*parts, nn.Linear(SIZES[-1], 2))
    optimiser = torch.optim.Adam(network.parameters(), lr=RATE)
    weight = torch.tensor([len(needed) / (2 * max(1, (~needed).sum())), len(needed) / (2 * max(1, needed.sum()))])
    loss = nn.CrossEntropyLoss(weight=weight.float())
    inputs, truth = torch.from_numpy(x), torch.from_numpy(needed.astype(np.int64))
    generator = torch.Generator().manual_seed(seed)
    best, best_score, waited = _weights(network), -1.0, 0
    for _ in range(EPOCHS):
        network.train()
        for batch in torch.randperm(len(x), generator=generator).split(BATCH):
            optimiser.zero_grad()
            loss(network(inputs[batch]), truth[batch]).backward()
            optimiser.step()
        score = _dev_score(network, dev, dev_needed)
        waited = 0 if score > best_score else waited + 1
        if score > best_score:
            best, best_score = _weights(network), score
        if waited >= PATIENCE:
            break
    return best


def _dev_score(network: Any, dev: Vector, needed: Bools) -> float:
    import torch

    network.eval()
    with torch.inference_mode():
        logits = network(torch.from_numpy(dev)).numpy()
    return auroc(needed, (logits[:, 1] - logits[:, 0]).astype(np.float64)) or 0.5


def _weights(network: Any) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    linear = [part for part in network if hasattr(part, "weight")]
    return [(part.weight.detach().numpy().copy(), part.bias.detach().numpy().copy()) for part in linear]
