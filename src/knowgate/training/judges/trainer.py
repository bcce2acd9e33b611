"""Teaching a pupil from lessons: order, updates, looks at the dev split, early stop, going on after an interruption.

Knows lessons and losses; not what is asked, nor what kind of model learns. An update whose gradients are no numbers is
skipped and counted; one that a GPU has no room for is done in smaller portions, which comes to the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.files import atomic_folder, sha256_text
from knowgate.errors import BadInput, BadSetting, OutOfMemory
from knowgate.stats.metrics import auroc
from knowgate.training.judges.checkpoint import (
    BEST_FOLDER,
    DevEvaluation,
    TrainingSegment,
    TrainingState,
    load_training_state,
    restore_checkpoint,
    save_checkpoint,
    save_final_state,
)
from knowgate.training.judges.trainable_models import TrainableModel, TrainingExample
from knowgate.training.judges.training_options import JudgeTrainingOptions

MAX_GRADIENT_NORM = 1.0  # longest gradient
MAX_SKIPPED_SHARE = 0.5  # of the updates of a leg; a training that skips more does not learn
DEV_BATCH = 32
OUT_OF_MEMORY_MESSAGE = (
    "not enough GPU memory to train on a single example: end other programs that use the GPU, use a smaller base, or "
    "hold it in fewer bits (--bits 4). What was finished is kept: the same command goes on from there."
)


@dataclass(frozen=True)
class JudgeProgress:
    """How far a training is; `done` and `total` count examples over all epochs. dev: at the end of a leg."""

    epoch: float
    done: int
    total: int
    rate: float  # examples per second of this start
    loss: float
    dev: DevEvaluation | None = None
    is_milestone: bool = False

    @property
    def unit(self) -> str:
        return "examples"

    @property
    def stage(self) -> str:
        return "training"

    @property
    def words(self) -> str:
        dev = "" if self.dev is None else format_dev_evaluation(self.dev.loss, self.dev.auroc)
        return f"epoch {self.epoch:g}, loss {self.loss:.3f}{dev}, {self.rate:.1f} examples/s"


JudgeProgressCallback = Callable[[JudgeProgress], None]


def format_dev_evaluation(loss: float, ranked: float | None) -> str:
    return f", dev loss {loss:.4f}" + ("" if ranked is None else f", dev AUROC {ranked:.3f}")


@dataclass(frozen=True)
class TrainedJudge:
    """The best leg's files, and what each leg came to."""

    files: dict[str, bytes] = field(repr=False)
    folder: Path
    state: TrainingState
    training: JudgeTrainingOptions
    examples: int

    def notes(self) -> list[str]:
        """The learning curve, what was kept, and what was skipped."""
        state, per_epoch = self.state, self.training.checks
        dev = [format_dev_evaluation(*look) for look in zip(state.dev_losses, state.dev_aurocs, strict=True)] or [
            ""
        ] * state.legs
        lines = [f"epoch {(i + 1) / per_epoch:g}: loss {loss:.4f}{dev[i]}" for i, loss in enumerate(state.losses)]
        lines.append(f"kept: epoch {(state.best + 1) / per_epoch:g}; trained for {state.seconds:.0f} s")
        if state.legs < self.training.legs:
            lines.append(f"stopped early: {self.training.patience} looks at the dev split brought no lower loss")
        if state.skipped:
            lines.append(f"{state.skipped} updates were skipped: their gradients were no numbers")
        return lines


def train_judge(
    pupil: TrainableModel,
    lessons: Sequence[TrainingExample],
    dev: Sequence[TrainingExample],
    training: JudgeTrainingOptions,
    work: Path,
    watch: JudgeProgressCallback,
) -> TrainedJudge:
    """Train, or go on where an earlier start in `work` stopped. The pupil is changed: open the judge from the files."""
    if not lessons:
        raise BadInput("there is no example to train on: all are longer than the limit of tokens, or none was graded.")
    done = load_training_state(work, _key(pupil, lessons, dev, training))
    if not done.is_over(training.legs, training.patience):
        done = _Run(pupil, training, work, watch).train(lessons, dev, done)
    folder = work / BEST_FOLDER
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return TrainedJudge(files, folder, done, training, len(lessons))


def _key(
    pupil: TrainableModel,
    lessons: Sequence[TrainingExample],
    dev: Sequence[TrainingExample],
    training: JudgeTrainingOptions,
) -> str:
    rows = [f"{lesson.cut.ids}{lesson.cut.positions}{lesson.shares}" for lesson in (*lessons, *dev)]
    return sha256_text(pupil.fingerprint, repr(asdict(training)), str(len(dev)), *rows)


@dataclass(frozen=True)
class _Run:
    """One training of one pupil."""

    pupil: TrainableModel
    training: JudgeTrainingOptions
    work: Path
    watch: JudgeProgressCallback
    portions: list[int] = field(default_factory=list)  # examples at once; the last one is what fits

    def train(
        self, lessons: Sequence[TrainingExample], dev: Sequence[TrainingExample], done: TrainingState
    ) -> TrainingState:
        import torch

        torch.manual_seed(self.training.seed)
        parameters = self.pupil.begin(self.training)
        optimiser = torch.optim.AdamW(parameters, lr=self.training.peak, weight_decay=self.training.weight_decay)
        if done.legs:
            restore_checkpoint(self.work, done, parameters, optimiser)
        while not done.is_over(self.training.legs, self.training.patience):
            leg = self._walk(done.legs, lessons, parameters, optimiser)
            look = self._look(dev) if dev else None
            done = done.after(leg, look)
            self._keep(done, parameters, optimiser)
            epoch, total = done.legs / self.training.checks, self.training.epochs * len(lessons)
            self.watch(JudgeProgress(epoch, round(epoch * len(lessons)), total, leg.rate, leg.loss, look, True))
        return done

    def _keep(self, done: TrainingState, parameters: list[Any], optimiser: Any) -> None:
        """The best weights so far, and what it takes to go on; without dev rows only the last weights are any good."""
        over = done.is_over(self.training.legs, self.training.patience)
        if done.best == done.legs - 1 and (done.dev_losses or over):
            with atomic_folder(self.work / BEST_FOLDER) as folder:
                self.pupil.save(folder)
        if over:
            save_final_state(self.work, done)
        elif self.training.saves:
            save_checkpoint(self.work, done, parameters, optimiser)

    def _walk(
        self, leg: int, lessons: Sequence[TrainingExample], parameters: list[Any], optimiser: Any
    ) -> TrainingSegment:
        """One leg; repeated after an interruption it goes the same way."""
        import torch

        self.pupil.set_training(True)
        batches = self._batches(leg, lessons)
        torch.manual_seed(self.training.seed * 1_000_003 + leg)  # dropout
        start, losses, seen, rate = time.perf_counter(), list[float](), 0, 0.0
        for batch in batches:
            for group in optimiser.param_groups:
                group["lr"] = self.training.peak * self.training.share(batch.update, batch.updates)
            losses.append(self._update([lessons[place] for place in batch.places], parameters, optimiser))
            seen += len(batch.places)
            rate = seen / max(1e-9, time.perf_counter() - start)
            epoch, done = leg // self.training.checks + 1, batch.done + len(batch.places)
            self.watch(JudgeProgress(epoch, done, self.training.epochs * len(lessons), rate, losses[-1]))
        kept = [loss for loss in losses if math.isfinite(loss)]
        if len(kept) < (1 - MAX_SKIPPED_SHARE) * len(losses):
            raise BadSetting(
                f"the training diverged: {len(losses) - len(kept)} of {len(losses)} updates had gradients that are no "
                "numbers. Use a smaller learning rate."
            )
        return TrainingSegment(
            float(np.mean(kept or [0.0])), rate, len(losses) - len(kept), time.perf_counter() - start
        )

    def _batches(self, leg: int, lessons: Sequence[TrainingExample]) -> list[_Batch]:
        """Those of one leg; the order of the examples is that of its epoch."""
        epoch, part = divmod(leg, self.training.checks)
        whole, before = self._epoch(epoch, lessons), epoch * len(lessons)
        first, last = (round(len(whole) * edge / self.training.checks) for edge in (part, part + 1))
        updates = len(whole) * self.training.epochs
        return [
            _Batch(whole[i], epoch * len(whole) + i, updates, before + i * self.training.batch)
            for i in range(first, last)
        ]

    def _epoch(self, epoch: int, lessons: Sequence[TrainingExample]) -> list[Sequence[int]]:
        """All examples in an order of their own, cut into batches; within a window those of like length together."""
        import torch

        generator = torch.Generator().manual_seed(self.training.seed * 1_000 + epoch)
        order = torch.randperm(len(lessons), generator=generator).tolist()
        batches: list[Sequence[int]] = []
        for window in _portions(order, self.training.batch * self.training.window):
            alike = (
                sorted(window, key=lambda place: len(lessons[place].cut.ids)) if self.training.window > 1 else window
            )
            cut = list(_portions(alike, self.training.batch))
            batches += [cut[place] for place in torch.randperm(len(cut), generator=generator).tolist()]
        return batches

    def _update(self, batch: Sequence[TrainingExample], parameters: list[Any], optimiser: Any) -> float:
        """The loss; NaN where nothing was learnt because a gradient was no number."""
        from knowgate.models.hf.batching import is_memory_error

        size = self.portions[-1] if self.portions else math.ceil(self.training.batch / self.training.accumulate)
        while True:
            try:
                return self._learn(batch, size, parameters, optimiser)
            except RuntimeError as error:
                if not is_memory_error(error):
                    raise
                if size == 1:
                    raise OutOfMemory(OUT_OF_MEMORY_MESSAGE) from error
            size = math.ceil(size / 2)
            self.portions.append(size)
            _let_go(optimiser)

    def _learn(self, batch: Sequence[TrainingExample], size: int, parameters: list[Any], optimiser: Any) -> float:
        import torch

        optimiser.zero_grad()
        total = 0.0
        for portion in _portions(batch, size):
            loss = self.pupil.loss(portion) * (len(portion) / len(batch))
            loss.backward()
            total += float(loss.detach())
        length = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        if not (math.isfinite(total) and bool(torch.isfinite(length))):
            return math.nan
        optimiser.step()
        return total

    def _look(self, dev: Sequence[TrainingExample]) -> DevEvaluation:
        import torch

        self.pupil.set_training(False)
        parts = list(_portions(dev, DEV_BATCH))
        with torch.no_grad():
            losses = [float(self.pupil.loss(part)) * len(part) for part in parts]
            margins = np.array([margin for part in parts for margin in self.pupil.margins(part)])
        truths = np.array([lesson.shares[-1] >= 0.5 for lesson in dev])
        return DevEvaluation(sum(losses) / len(dev), auroc(truths, margins))


@dataclass(frozen=True)
class _Batch:
    """Examples of one update, which update it is of how many, and how many examples came before."""

    places: Sequence[int]
    update: int
    updates: int
    done: int


def _let_go(optimiser: Any) -> None:
    """What an update that did not fit has left on the GPU."""
    import torch

    optimiser.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _portions(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
