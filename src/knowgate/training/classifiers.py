"""Train the small classifiers that gates apply in numpy: the probe's network (torch) and linear ones (scikit-learn)."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadInput
from knowgate.gates.artifacts.networks import apply_network
from knowgate.stats.metrics import BoolArray, FloatArray, auroc, logit
from knowgate.training.examples import Examples
from knowgate.types import Vector

HIDDEN_SIZES = (512, 64, 32)  # CBDR section 3.1
DROPOUT, LEARNING_RATE, BATCH_SIZE, EPOCHS = 0.5, 5e-5, 16, 30
SEEDS = (0, 42, 100)
PATIENCE = 6  # epochs without a better dev AUROC
C_GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # scikit-learn's C, the inverse of regularization
# An epoch is a pass over the rows, or this many updates if a pass has more: the paper's 2,000 rows in batches of 16.
# More rows get the higher rate. 10,000 x 2,048 with passes of full length took 515 s (dev AUROC .901 on a planted rule)
# and 319 s (.876 on low-rank states); 200 updates at the paper's rate 86 s (.902) and 82 s (.877); 125 at this one
# about 55 s (.898, .874) and the same AUROC on held-out rows within .003.
MAX_UPDATES, LARGE_DATA_LEARNING_RATE = 125, 7e-5
LARGEST_FEATURE = 1e18  # its square is near the largest 32-bit float
PROBABILITY_FLOOR = 1e-12  # fine-tuned judges give probabilities below 1e-6 that should stay distinct
MIN_SLOPE = 1e-3  # a calibration must not reverse the order of scores
Tensors = dict[str, NDArray[Any]]
LayerWeights = list[tuple[NDArray[Any], NDArray[Any]]]  # weight (out x in) and bias of each layer


class LabeledFeatures(NamedTuple):
    """Training data of a classifier.

    Attributes:
        features: One row of numbers per question.
        needed: Whether each question needs retrieval; this is the class to predict.
    """

    features: Vector
    needed: BoolArray


def select_train_and_dev(features: Vector, examples: Examples) -> tuple[LabeledFeatures, LabeledFeatures]:
    """Return the rows and classes of the train split, and of the dev split (for tuning)."""
    train, dev, needed = examples.split.train, examples.split.dev, examples.needed
    return LabeledFeatures(features[train], needed[train]), LabeledFeatures(features[dev], needed[dev])


class LinearFit(NamedTuple):
    """A fitted logistic regression. A high `strength` (scikit-learn's C) means little regularization."""

    strength: float
    tensors: Tensors


def check_finite(features: Vector) -> None:
    """Raise BadInput if a feature is NaN, infinite or extremely large."""
    if not (np.abs(features) < LARGEST_FEATURE).all():  # False for NaN, too
        raise BadInput(
            "the label runs (recorded answers) contain NaN, infinite or extremely large values. Label the questions again with "
            "`knowgate label`."
        )


def fit_standardization(features: Vector) -> Tensors:
    """Return mean and standard deviation of each column. Constant columns get the scale 1."""
    check_finite(features)
    scale = features.std(axis=0)
    return {
        "mean": features.mean(axis=0).astype(np.float32),
        "scale": np.where(scale < 1e-6, 1.0, scale).astype(np.float32),
    }


def _standardize(features: Vector, tensors: Tensors) -> Vector:
    """Subtract the mean of each column and divide by its scale."""
    return np.asarray((features - tensors["mean"]) / tensors["scale"], dtype=np.float32)


# --- linear classifiers ---------------------------------------------------------------------------


def fit_linear(features: Vector, needed: BoolArray, strength: float = 1.0) -> Tensors:
    """Fit a logistic regression on standardized features, and return its weights.

    Args:
        features: One row per question.
        needed: Class of each row: whether the question needs retrieval.
        strength: scikit-learn's C, the inverse of regularization.
    """
    tensors = fit_standardization(features)
    fitted = fit_logistic((features - tensors["mean"]) / tensors["scale"], needed, C=strength)
    # The names are those of an ensemble of networks: member 0, layer 0.
    tensors["0.0.weight"] = fitted.coef_.astype(np.float32)
    tensors["0.0.bias"] = fitted.intercept_.astype(np.float32)
    return tensors


def fit_logistic(features: NDArray[Any], classes: NDArray[Any], **settings: Any) -> Any:
    """Fit scikit-learn's LogisticRegression on one thread, which is faster on little data."""
    from sklearn.linear_model import LogisticRegression

    # OpenBLAS sometimes reports an invalid value although all numbers are finite.
    with _get_threadpools().limit(limits=1), np.errstate(invalid="ignore"):
        return LogisticRegression(**{"max_iter": 500, **settings}).fit(features, classes)


@functools.cache
def _get_threadpools() -> Any:
    """Return the control of the thread pools of numeric libraries. Finding them takes as long as a small fit."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def tune_linear(train: LabeledFeatures, dev: LabeledFeatures) -> LinearFit:
    """Fit logistic regressions with several C, and return the best on the dev split (AUROC)."""
    fits = [LinearFit(c, fit_linear(train.features, train.needed, c)) for c in C_GRID]
    scores = [auroc_or_half(dev.needed, apply_network(fit.tensors, dev.features)) for fit in fits]
    return fits[int(np.argmax(scores))]


def make_scorer(tensors: Tensors, features: Vector) -> Callable[[Sequence[int]], FloatArray]:
    """Return a function that scores the rows of `features` with the given indices."""
    return lambda indices: apply_network(tensors, features[list(indices)])


def auroc_or_half(needed: BoolArray, needs: NDArray[np.float64]) -> float:
    """Return the AUROC, or 0.5 (chance) if all questions are of one class."""
    score = auroc(needed, needs)
    return 0.5 if score is None else score


def fit_platt_scaling(raw: FloatArray, needed: BoolArray) -> dict[str, Any]:
    """Fit the calibration of raw scores: sigmoid(a * logit(score) + b).

    Platt scaling keeps the order of the scores.

    Args:
        raw: Scores in [0, 1].
        needed: Whether each question needs retrieval.

    Returns:
        The parameters, as the manifest stores them: {"kind": "platt", "a": ..., "b": ..., "floor": ...}. If all questions
        are of one class, {"kind": "none"}: the scores stay as they are.
    """
    if not 0 < needed.sum() < len(needed):
        return {"kind": "none"}
    fitted = fit_logistic(logit(raw, PROBABILITY_FLOOR)[:, None], needed, C=1e3, max_iter=100)
    slope = float(fitted.coef_.item())
    shift = float(fitted.intercept_.item())
    if slope < MIN_SLOPE:  # The scores carry no information, so predict the base rate for almost all of them.
        slope = MIN_SLOPE
        shift = logit(float(np.clip(needed.mean(), 1e-3, 1 - 1e-3)))
    return {"kind": "platt", "a": slope, "b": shift, "floor": PROBABILITY_FLOOR}


# --- the probe's network --------------------------------------------------------------------------


def fit_mlp(
    train: LabeledFeatures, dev: LabeledFeatures, *, seeds: Sequence[int] = SEEDS, by_accuracy: bool = False
) -> Tensors:
    """Train the network of the CBDR paper once per seed, as an ensemble.

    The best epoch of each network is chosen on the dev rows.

    Args:
        train: Training rows.
        dev: Rows on which the epoch is chosen.
        seeds: One network is trained for each seed.
        by_accuracy: Choose the epoch by dev accuracy, as in the paper; of equally good epochs, the last one. Default: by
            AUROC.
    """
    tensors = fit_standardization(train.features)
    scaled_train = LabeledFeatures(_standardize(train.features, tensors), train.needed)
    scaled_dev = LabeledFeatures(_standardize(dev.features, tensors), dev.needed)
    stop = threading.Event()
    train_member = functools.partial(_train_member, scaled_train, scaled_dev, stop=stop, by_accuracy=by_accuracy)
    with _open_worker_pool(len(seeds)) as pool:
        try:
            members = list(pool.map(train_member, seeds))
        finally:
            stop.set()  # After Ctrl-C, the other threads stop after their current batch.
    for number, layers in enumerate(members):
        for depth, (weight, bias) in enumerate(layers):
            tensors[f"{number}.{depth}.weight"] = weight
            tensors[f"{number}.{depth}.bias"] = bias
    return tensors


@contextlib.contextmanager
def _open_worker_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Open a pool of threads, each of which runs torch without further threads, because batches are small."""
    import torch

    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _train_member(
    train: LabeledFeatures, dev: LabeledFeatures, seed: int, *, stop: threading.Event, by_accuracy: bool
) -> LayerWeights:
    """Train one network and return the weights of its best epoch on the dev data.

    Training stops after PATIENCE epochs without improvement.

    Args:
        train: Training rows.
        dev: Rows on which the best epoch is chosen.
        seed: Seed of the initial weights, the order of the rows and the dropout.
        stop: Set by another thread to end the training early.
        by_accuracy: Compare epochs by accuracy instead of AUROC. Of equally good epochs, the last one wins.
    """
    import torch

    network = _Network(train.features.shape[1], seed)
    updates = _iterate_updates(network, train)
    epoch_length = min(_count_batches(train), MAX_UPDATES)
    dev_inputs = torch.from_numpy(dev.features)
    best = network.copy_weights()
    best_score = -1.0
    epochs_without_gain = 0
    for _ in range(EPOCHS):
        for _ in itertools.islice(updates, epoch_length):
            if stop.is_set():
                return best
        score = _score_epoch(network.compute_margins(dev_inputs), dev.needed, by_accuracy=by_accuracy)
        # Without a score, epochs cannot be compared, so the last one counts.
        if score is None or score > best_score or (by_accuracy and score == best_score):
            best = network.copy_weights()
            best_score = best_score if score is None else score
            epochs_without_gain = 0
        else:
            epochs_without_gain += 1
        if epochs_without_gain >= PATIENCE:
            break
    return best


def _count_batches(train: LabeledFeatures) -> int:
    """Return the number of batches of one pass over all rows."""
    return math.ceil(len(train.features) / BATCH_SIZE)


def _iterate_updates(network: _Network, train: LabeledFeatures) -> Iterator[None]:
    """Train a network forever. Each item of the iterator stands for one update of the weights."""
    import torch

    # On large data, epochs are cut to MAX_UPDATES updates, with a higher learning rate.
    rate = LEARNING_RATE if _count_batches(train) <= MAX_UPDATES else LARGE_DATA_LEARNING_RATE
    optimizer = torch.optim.Adam(itertools.chain(*network.layers), lr=rate, fused=True)
    inputs = torch.from_numpy(train.features)
    classes = torch.from_numpy(train.needed.astype(np.int64))
    # Both classes get the same total weight, however rare one of them is.
    class_weights = len(classes) / (2 * torch.bincount(classes, minlength=2).clamp(min=1))
    weights = class_weights[classes]
    for rows in network.iterate_batches(len(classes)):
        optimizer.zero_grad()
        logits = network.compute_logits(inputs[rows], drop=True)
        # The paper's code applies softmax before this loss, which applies it again. Here it is applied once.
        losses = torch.nn.functional.cross_entropy(logits, classes[rows], reduction="none")
        weighted_mean = (losses * weights[rows]).sum() / weights[rows].sum()
        weighted_mean.backward()
        optimizer.step()
        yield


def _score_epoch(margins: NDArray[np.float64], needed: BoolArray, *, by_accuracy: bool) -> float | None:
    """Score the predictions of an epoch on the dev data.

    Args:
        margins: Logit of "needed" minus logit of "not needed" for each row, so above 0 predicts "needed".
        needed: The true classes.
        by_accuracy: Use accuracy instead of AUROC.

    Returns:
        The score; None if the AUROC is not defined because all rows are of one class, or if there are no rows.
    """
    if not len(needed):
        return None
    return float(((margins > 0) == needed).mean()) if by_accuracy else auroc(needed, margins)


class _Network:
    """The feed-forward network of the CBDR paper, with three layers and dropout.

    Each network has its own random generator, because threads share torch's global one.
    """

    def __init__(self, width: int, seed: int):
        """Create layers with random weights, from `width` inputs to two outputs."""
        import torch

        self._generator = torch.Generator().manual_seed(seed)
        sizes = (width, *HIDDEN_SIZES, 2)
        self.layers = [self._make_layer(inputs, outputs) for inputs, outputs in itertools.pairwise(sizes)]

    def _make_layer(self, inputs: int, outputs: int) -> tuple[Any, Any]:
        """Draw the initial weight and bias of a layer, distributed as in torch's Linear."""
        import torch

        bound = inputs**-0.5
        weight = torch.empty((inputs, outputs)).uniform_(-bound, bound, generator=self._generator)
        bias = torch.empty(outputs).uniform_(-bound, bound, generator=self._generator)
        return weight.requires_grad_(), bias.requires_grad_()

    def iterate_batches(self, n_rows: int) -> Iterator[Any]:
        """Yield batches of row indices forever. Each pass has a new random order."""
        import torch

        while True:
            yield from torch.randperm(n_rows, generator=self._generator).split(BATCH_SIZE)

    def compute_logits(self, x: Any, *, drop: bool) -> Any:
        """Return the logits of "not needed" and "needed" for each row."""
        import torch

        for weight, bias in self.layers[:-1]:
            x = torch.relu(torch.addmm(bias, x, weight))
            x = x * self._draw_dropout_mask(x.shape) if drop else x
        weight, bias = self.layers[-1]
        return torch.addmm(bias, x, weight)

    def _draw_dropout_mask(self, shape: tuple[int, ...]) -> Any:
        """Draw the factors of dropout: 0 for dropped values, above 1 for all other values."""
        import torch

        return torch.empty(shape).bernoulli_(1 - DROPOUT, generator=self._generator) / (1 - DROPOUT)

    def compute_margins(self, x: Any) -> NDArray[np.float64]:
        """Return the logit of "needed" minus the logit of "not needed" for each row."""
        import torch

        with torch.inference_mode():
            not_needed, needed = self.compute_logits(x, drop=False).double().numpy().T
        return np.asarray(needed - not_needed)

    def copy_weights(self) -> LayerWeights:
        """Return a copy of the weights in the shape that gates expect: (outputs, inputs)."""
        return [(weight.detach().numpy().T.copy(), bias.detach().numpy().copy()) for weight, bias in self.layers]
