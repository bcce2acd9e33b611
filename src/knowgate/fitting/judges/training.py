"""Fine-tuning a causal model to say one of two words: LoRA (peft), or all weights. Loss on the label tokens alone.

Knows token ids and marked places; not what is asked. Runs on CUDA in bf16 where there is one, else on CPU in fp32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from knowgate.errors import BadInput, BadSetting
from knowgate.files import new_folder, sha256_text
from knowgate.fitting.judges.checkpoint import BEST, TrainingState, begun, keep, restore
from knowgate.fitting.judges.trained_model import (
    JudgeTraining,
    Lesson,
    learning_rate,
    mean_loss,
    save_trained,
    trainable,
)

if TYPE_CHECKING:
    from knowgate.models import HFModel
CLIP = 1.0  # longest gradient


@dataclass(frozen=True)
class JudgeStep:
    """How far a training is; `done` and `total` count examples over all epochs. dev_loss: at the end of an epoch."""

    epoch: int
    done: int
    total: int
    rate: float  # examples per second of this start
    loss: float
    dev_loss: float | None = None

    @property
    def unit(self) -> str:
        return "examples"

    @property
    def stage(self) -> str:
        return "training"

    @property
    def words(self) -> str:
        dev = "" if self.dev_loss is None else f", dev loss {self.dev_loss:.3f}"
        return f"epoch {self.epoch}, loss {self.loss:.3f}{dev}, {self.rate:.1f} examples/s"

    @property
    def is_milestone(self) -> bool:
        return self.dev_loss is not None


Watch = Callable[[JudgeStep], None]


class EpochResult(NamedTuple):
    """Mean loss of an epoch, and how many examples a second it took in."""

    loss: float
    rate: float


@dataclass(frozen=True)
class TrainedJudge:
    """The best epoch's files, and what each epoch came to."""

    files: dict[str, bytes] = field(repr=False)
    folder: Path
    losses: tuple[float, ...]
    dev_losses: tuple[float, ...]
    best: int

    def notes(self) -> list[str]:
        dev = [f", dev {loss:.4f}" for loss in self.dev_losses] or [""] * len(self.losses)
        lines = [f"epoch {i + 1}: loss {loss:.4f}{dev[i]}" for i, loss in enumerate(self.losses)]
        return [*lines, f"kept: epoch {self.best + 1}"]


def train_judge(
    base: HFModel, lessons: Sequence[Lesson], dev: Sequence[Lesson], training: JudgeTraining, work: Path, watch: Watch
) -> TrainedJudge:
    """Train, or go on where an earlier start in `work` stopped. `base` is changed: open the judge from the files."""
    if not lessons:
        raise BadInput("there is no example to train on: all are longer than the limit of tokens, or none was graded.")
    done = begun(work, _key(base, lessons, dev, training))
    if done.epochs < training.epochs:
        done = _Run(base, training, work, watch).train(lessons, dev, done)
    folder = work / BEST
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return TrainedJudge(files, folder, done.losses, done.dev_losses, done.best)


def _key(base: HFModel, lessons: Sequence[Lesson], dev: Sequence[Lesson], training: JudgeTraining) -> str:
    rows = [f"{lesson.cut.ids}{lesson.cut.marks}{lesson.targets}" for lesson in (*lessons, *dev)]
    return sha256_text(base.fingerprint, repr(asdict(training)), str(len(dev)), *rows)


@dataclass(frozen=True)
class _Run:
    """One training on one model."""

    base: HFModel
    training: JudgeTraining
    work: Path
    watch: Watch

    def train(self, lessons: Sequence[Lesson], dev: Sequence[Lesson], done: TrainingState) -> TrainingState:
        import torch

        torch.manual_seed(self.training.seed)
        trained = trainable(self.base, self.training)
        parameters = [value for value in trained.parameters() if value.requires_grad]
        optimiser = torch.optim.AdamW(parameters, lr=self.training.peak, weight_decay=0.0)
        if done.epochs:
            restore(self.work, done, parameters, optimiser)
        for epoch in range(done.epochs, self.training.epochs):
            walked = self._epoch(epoch, lessons, parameters, optimiser)
            dev_loss = self._dev_loss(dev) if dev else None
            done = done.after(walked.loss, dev_loss)
            if done.best == epoch:
                self._save_best(trained)
            keep(self.work, done, parameters, optimiser)
            total = self.training.epochs * len(lessons)
            self.watch(JudgeStep(epoch + 1, (epoch + 1) * len(lessons), total, walked.rate, walked.loss, dev_loss))
        return done

    def _epoch(self, epoch: int, lessons: Sequence[Lesson], parameters: list[Any], optimiser: Any) -> EpochResult:
        """One walk over the examples in an order of its own; repeated after an interruption it goes the same way."""
        import torch

        torch.manual_seed(self.training.seed * 1_000 + epoch)  # the order, and dropout
        self.base.loaded.model.train()
        updates = math.ceil(len(lessons) / self.training.batch)
        start, total, rate = time.perf_counter(), 0.0, 0.0
        order = torch.randperm(len(lessons)).tolist()
        for number, batch in enumerate(_portions(order, self.training.batch)):
            share = learning_rate(epoch * updates + number, updates * self.training.epochs)
            for group in optimiser.param_groups:
                group["lr"] = self.training.peak * share
            loss = self._update([lessons[place] for place in batch], parameters, optimiser)
            total += loss * len(batch)
            seen = min((number + 1) * self.training.batch, len(lessons))
            rate = seen / max(1e-9, time.perf_counter() - start)
            done = epoch * len(lessons) + seen
            self.watch(JudgeStep(epoch + 1, done, self.training.epochs * len(lessons), rate, loss))
        return EpochResult(total / len(lessons), rate)

    def _update(self, batch: Sequence[Lesson], parameters: list[Any], optimiser: Any) -> float:
        import torch

        optimiser.zero_grad()
        total = 0.0
        for portion in _portions(batch, math.ceil(self.training.batch / self.training.accumulate)):
            loss = mean_loss(self.base, portion) * (len(portion) / len(batch))
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise BadSetting(f"the training diverged (loss {total}). Use a smaller learning rate.")
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimiser.step()
        return total

    def _dev_loss(self, dev: Sequence[Lesson]) -> float:
        import torch

        self.base.loaded.model.eval()
        with torch.no_grad():
            parts = [float(mean_loss(self.base, part)) * len(part) for part in _portions(dev, self.training.batch)]
        return sum(parts) / len(dev)

    def _save_best(self, trained: Any) -> None:
        with new_folder(self.work / BEST) as folder:
            save_trained(trained, self.base, folder)


def _portions(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
