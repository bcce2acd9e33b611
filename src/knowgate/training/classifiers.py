"""Training the small classifiers that gates apply in numpy: the probe's (torch), a linear one (scikit-learn)."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from knowgate.errors import BadInput
from knowgate.gates.artifacts.networks import apply_network
from knowgate.stats.logistic import logit
from knowgate.stats.metrics import BoolArray, FloatArray, auroc
from knowgate.types import Vector

HIDDEN_SIZES = (512, 64, 32)  # CBDR section 3.1
DROPOUT, LEARNING_RATE, BATCH_SIZE, EPOCHS = 0.5, 5e-5, 16, 30
SEEDS = (0, 42, 100)
PATIENCE = 6  # epochs without a better dev AUROC
C_GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # scikit-learn's C, the inverse of regularisation
# An epoch is a pass over the rows, or this many updates if a pass has more: the paper's 2,000 rows in batches of 16.
# More rows get the higher rate. 10,000 x 2,048 with passes of full length took 515 s (dev AUROC .901 on a planted rule)
# and 319 s (.876 on low-rank states); 200 updates at the paper's rate 86 s (.902) and 82 s (.877); 125 at this one
# about 55 s (.898, .874) and the same AUROC on held-out rows within .003.
MAX_UPDATES, LARGE_DATA_LEARNING_RATE = 125, 7e-5
Tensors = dict[str, NDArray[Any]]
LayerWeights = list[tuple[NDArray[Any], NDArray[Any]]]  # weight (out x in) and bias of each


class LinearFit(NamedTuple):
    """A fitted logistic regression and its strength of regularisation."""

    strength: float
    tensors: Tensors


def check_finite(features: Vector) -> None:
    """Refuse states or signals that are not numbers, whichever split they would fall into."""
    if not np.isfinite(features).all():
        raise BadInput("the label runs hold NaN among their signals; label again.")


def fit_standardization(features: Vector) -> Tensors:
    """Mean and scale of the training rows; constant columns get scale 1."""
    check_finite(features)
    scale = features.std(axis=0)
    return {
        "mean": features.mean(axis=0).astype(np.float32),
        "scale": np.where(scale < 1e-6, 1.0, scale).astype(np.float32),
    }


def fit_linear(
    features: Vector, needed: BoolArray, strength: float = 1.0, weights: FloatArray | None = None
) -> Tensors:
    """Regularised logistic regression on standardised features; `strength` is scikit-learn's C.

    weights: how much each row counts in the loss; None for all the same.
    """
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    tensors = fit_standardization(features)
    x = (features - tensors["mean"]) / tensors["scale"]
    with threadpool_limits(1):  # so small that threads only wait for each other
        fitted = LogisticRegression(C=strength, max_iter=500).fit(x, needed, sample_weight=weights)
    tensors["0.0.weight"] = fitted.coef_.astype(np.float32)
    tensors["0.0.bias"] = fitted.intercept_.astype(np.float32)
    return tensors


def tune_linear(
    features: Vector, needed: BoolArray, dev: Vector, dev_needed: BoolArray, weights: FloatArray | None = None
) -> LinearFit:
    """The strength of regularisation that ranks the dev rows best; among equals the strictest."""
    tried = [LinearFit(strength, fit_linear(features, needed, strength, weights)) for strength in C_GRID]
    scores = [auroc_or_half(dev_needed, apply_network(each.tensors, dev)) for each in tried]
    return tried[int(np.argmax(scores))]


def fit_best_linear(
    features: Vector, needed: BoolArray, dev: Vector, dev_needed: BoolArray, weights: FloatArray | None = None
) -> Tensors:
    return tune_linear(features, needed, dev, dev_needed, weights).tensors


def auroc_or_half(needed: BoolArray, needs: NDArray[np.float64]) -> float:
    """AUROC for comparing fits: one half where it is not defined."""
    found = auroc(needed, needs)
    return 0.5 if found is None else found


def fit_mlp(
    features: Vector,
    needed: BoolArray,
    dev: Vector,
    dev_needed: BoolArray,
    weights: FloatArray | None = None,
    seeds: Sequence[int] = SEEDS,
    *,
    in_full: bool = False,
) -> Tensors:
    """The paper's network, one member per seed, each at its best dev epoch. One softmax: the original has two.

    in_full: the paper's 30 epochs of 125 updates, however few the rows, and the last of those with the best dev
    accuracy: raw confidence grows with the updates, and a beta of .95 belongs to a network that was trained so long.
    """
    tensors = fit_standardization(features)
    x, unseen = _scaled(features, tensors), _scaled(dev, tensors)
    counts = np.ones(len(x)) if weights is None else weights
    stop = threading.Event()
    with _worker_for_each(seeds) as pool:
        try:
            work = functools.partial(_train, x, needed, counts, unseen, dev_needed, stop=stop, in_full=in_full)
            trained = list(pool.map(work, seeds))
        finally:
            stop.set()  # after Ctrl-C the members end with their batch, not with their training
    for number, layers in enumerate(trained):
        for depth, (weight, bias) in enumerate(layers):
            tensors[f"{number}.{depth}.weight"], tensors[f"{number}.{depth}.bias"] = weight, bias
    return tensors


def _scaled(features: Vector, tensors: Tensors) -> Vector:
    scaled: Vector = ((features - tensors["mean"]) / tensors["scale"]).astype(np.float32)
    return scaled


@contextlib.contextmanager
def _worker_for_each(seeds: Sequence[int]) -> Iterator[ThreadPoolExecutor]:
    """Members side by side, each on one thread: in batches of 16 torch's own threads mostly wait for each other."""
    import torch

    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(len(seeds), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _train(
    x: Vector,
    needed: BoolArray,
    weights: FloatArray,
    dev: Vector,
    dev_needed: BoolArray,
    seed: int,
    *,
    stop: threading.Event,
    in_full: bool,
) -> LayerWeights:
    """One member at its best dev epoch; where dev rows are all of a kind and cannot tell, at its last."""
    import torch

    network = _Network(x.shape[1], seed)
    batches, updates = network.batches(len(x)), -(-len(x) // BATCH_SIZE)
    rate, updates = (LEARNING_RATE, updates) if updates <= MAX_UPDATES else (LARGE_DATA_LEARNING_RATE, MAX_UPDATES)
    updates = MAX_UPDATES if in_full else updates
    optimiser = torch.optim.Adam(itertools.chain(*network.layers), lr=rate, fused=True)
    inputs, truth, unseen = (torch.from_numpy(each) for each in (x, needed.astype(np.int64), dev))
    of_kind = len(x) / (2 * torch.bincount(truth, minlength=2).clamp(min=1))
    counts = of_kind[truth] * torch.from_numpy(weights.astype(np.float32))
    best, best_score, waited = network.weights(), -1.0, 0
    for _ in range(EPOCHS):
        for rows in itertools.islice(batches, updates):
            if stop.is_set():
                return best
            optimiser.zero_grad()
            losses = torch.nn.functional.cross_entropy(
                network.logits(inputs[rows], drop=True), truth[rows], reduction="none"
            )
            ((losses * counts[rows]).sum() / counts[rows].sum()).backward()
            optimiser.step()
        margins = network.margins(unseen)
        score = float(((margins > 0) == dev_needed).mean()) if in_full and len(dev) else auroc(dev_needed, margins)
        waited += 1
        if score is None or score > best_score or (in_full and score == best_score):
            best, best_score, waited = network.weights(), -1.0 if score is None else score, 0
        if waited >= PATIENCE and not in_full:
            break
    return best


class _Network:
    """The paper's network. It has its own random numbers, as torch's are shared by all threads."""

    def __init__(self, width: int, seed: int):
        import torch

        self._generator = torch.Generator().manual_seed(seed)
        self.layers = [self._layer(a, b) for a, b in itertools.pairwise((width, *HIDDEN_SIZES, 2))]

    def _layer(self, inputs: int, outputs: int) -> tuple[Any, Any]:
        """Weight (in x out: 10 % faster than torch's out x in) and bias, drawn as torch draws those of its layers."""
        import torch

        bound = inputs**-0.5
        sizes = (inputs, outputs), (outputs,)
        weight, bias = (torch.empty(size).uniform_(-bound, bound, generator=self._generator) for size in sizes)
        return weight.requires_grad_(), bias.requires_grad_()

    def batches(self, rows: int) -> Iterator[Any]:
        """Row numbers in random order, pass after pass, for ever."""
        import torch

        while True:
            yield from torch.randperm(rows, generator=self._generator).split(BATCH_SIZE)

    def logits(self, x: Any, *, drop: bool) -> Any:
        import torch

        for weight, bias in self.layers[:-1]:
            x = torch.relu(torch.addmm(bias, x, weight))
            x = x * self._mask(x.shape) if drop else x
        weight, bias = self.layers[-1]
        return torch.addmm(bias, x, weight)

    def _mask(self, shape: tuple[int, ...]) -> Any:
        """Dropout: what is kept grows, so that sums stay as they are on average."""
        import torch

        return torch.empty(shape).bernoulli_(1 - DROPOUT, generator=self._generator) / (1 - DROPOUT)

    def margins(self, x: Any) -> NDArray[np.float64]:
        """The logit of `needed` of each row."""
        import torch

        with torch.inference_mode():
            logits = self.logits(x, drop=False).double().numpy()
        margins: NDArray[np.float64] = logits[:, 1] - logits[:, 0]
        return margins

    def weights(self) -> LayerWeights:
        """A copy, as the gate applies it: out x in."""
        return [(weight.detach().numpy().T.copy(), bias.detach().numpy().copy()) for weight, bias in self.layers]


PROBABILITY_FLOOR = 1e-12  # a fine-tuned judge is surer than 1e-6, and what it tells apart should stay apart
MIN_SLOPE = 1e-3  # a calibration may not turn the order round


def fit_platt_scaling(raw: FloatArray, needed: BoolArray, weights: FloatArray | None = None) -> dict[str, Any]:
    """A calibration for a manifest: Platt's two parameters on the logit; none if only one kind is there.

    It keeps the order and every difference of the scores, so that a threshold can lie between any two questions.
    Isotonic regression, which gates fitted before may hold, does not: on the recorded runs (two LLMs, six data sets,
    three raw scores, calibrated on the train run, tested on the other; `python -m benchmarks.calibrations`) it left 3 %
    of the distinct scores, and AUROC fell from .655 to .649. Expected calibration error is .029 for Platt and .028 for
    isotonic (.037 and .040 with 300 rows), the Brier score .1040 and .1046.

    weights: how much each row counts; None for all the same.
    """
    if not 0 < needed.sum() < len(needed):
        return {"kind": "none"}
    fitted = LogisticRegression(C=1e3).fit(logit(raw, PROBABILITY_FLOOR)[:, None], needed, sample_weight=weights)
    slope, shift = float(fitted.coef_[0][0]), float(fitted.intercept_[0])
    if slope < MIN_SLOPE:
        slope, shift = MIN_SLOPE, logit(float(np.clip(np.average(needed, weights=weights), 1e-3, 1 - 1e-3)))
    return {"kind": "platt", "a": slope, "b": shift, "floor": PROBABILITY_FLOOR}
