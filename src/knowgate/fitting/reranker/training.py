"""Training a cross-encoder on groups: one question, its passages, one loss over them.

Knows groups and losses; not where they come from, nor where the model is kept. The loop is our own: AdamW, a linear
schedule with warm-up, clipped gradients, bf16 on a GPU, as the usual trainers have them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from knowgate.doors import COUNT, check_seed, shown
from knowgate.errors import BadInput, BadSetting, MissingExtra

QUERY_TOKENS, PASSAGE_TOKENS = 128, 512  # CBDR 4.1.5, as are the rate, the weight decay and the single epoch
LOSSES = ("infonce", "listwise")


@dataclass(frozen=True)
class Group:
    """A question with passages and a label for each: 1 or 0 for InfoNCE, shifts for the listwise loss."""

    question: str
    passages: tuple[str, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True)
class RerankTraining:
    """How a reranker is trained. The paper does not print its temperature or batch; 1 keeps scores ordinary logits."""

    loss: str = "infonce"
    temperature: float = 1.0
    epochs: int = 1
    batch: int = 8
    rate: float = 6e-5
    weight_decay: float = 0.01
    warm_up: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise BadSetting(f"--loss is '{self.loss}'; allowed: {', '.join(LOSSES)}.")
        check_seed(self.seed)
        for name in ("temperature", "epochs", "batch", "rate"):
            if not 0 < getattr(self, name) <= COUNT:
                raise BadSetting(f"training: {name} is {shown(getattr(self, name))}; it must be above 0.")


@dataclass(frozen=True)
class RerankStep:
    """How far a training is, in groups over all epochs."""

    done: int
    total: int
    rate: float
    loss: float


@dataclass(frozen=True)
class TrainingLog:
    """Losses in the order they were logged, and how long it took."""

    losses: tuple[float, ...]
    groups: int
    seconds: float

    @property
    def first(self) -> float:
        return self.losses[0] if self.losses else math.nan

    @property
    def last(self) -> float:
        return self.losses[-1] if self.losses else math.nan


Watch = Callable[[RerankStep], None]
STEEPEST = 1.0  # norm that gradients are clipped to


def train_groups(
    model: Any, groups: Sequence[Group], training: RerankTraining, watch: Watch = lambda step: None
) -> TrainingLog:
    """Train a `CrossEncoder` in place."""
    if not groups:
        raise BadInput("there is nothing to train the reranker on: no question has positives and negatives.")
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtra("training a reranker", "train") from error
    from knowgate.fitting.reranker.loss import GroupLoss

    loss_of = GroupLoss(model, training.loss, training.temperature)
    steps = training.epochs * math.ceil(len(groups) / training.batch)
    learning = Learning.of(model, training, steps)
    losses: list[float] = []
    done, start, total = 0, time.perf_counter(), len(groups) * training.epochs
    torch.manual_seed(training.seed)
    model.train()
    try:
        for batch in shuffled(groups, training):
            with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
                loss = loss_of([[group.question for group in batch], [group.passages for group in batch]],
                               [torch.tensor(group.labels) for group in batch])  # fmt: skip
            learning.step(loss)
            losses.append(float(loss.detach()))
            done += len(batch)
            watch(RerankStep(done, total, done / (time.perf_counter() - start), losses[-1]))
    finally:
        model.eval()
    return TrainingLog(tuple(losses), len(groups), time.perf_counter() - start)


def shuffled(groups: Sequence[Group], training: RerankTraining) -> Iterator[list[Group]]:
    """Batches of all groups, in another order in each epoch; the same ones for the same seed."""
    rng = np.random.default_rng(training.seed)
    for _ in range(training.epochs):
        order = rng.permutation(len(groups)).tolist()
        for place in range(0, len(order), training.batch):
            yield [groups[number] for number in order[place : place + training.batch]]


@dataclass(frozen=True)
class Learning:
    """Optimiser and schedule of one training."""

    parameters: list[Any]
    optimiser: Any
    schedule: Any

    @classmethod
    def of(cls, model: Any, training: RerankTraining, steps: int) -> Learning:
        """Weight decay spares biases and norms, as is the custom; the rate rises, then falls to 0 in a line."""
        import torch

        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        plain = [one for _, one in named if one.ndim < 2]
        decayed = [one for _, one in named if one.ndim >= 2]
        optimiser = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": training.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=training.rate,
        )
        rising = round(training.warm_up * steps)

        def share(step: int) -> float:
            return step / rising if step < rising else (steps - step) / max(1, steps - rising)

        return cls([one for _, one in named], optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, share))

    def step(self, loss: Any) -> None:
        import torch

        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, STEEPEST)
        self.optimiser.step()
        self.schedule.step()
        self.optimiser.zero_grad(set_to_none=True)
