"""Train a judge: batches, updates, evaluation on the dev split, early stopping, and resuming after an interruption.

An update whose gradient is not finite is skipped and counted. A batch that does not fit into GPU memory is run in
smaller portions, with the same result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core import split_batches
from knowgate.core.files import atomic_folder, sha256_text
from knowgate.errors import BadInput, BadSetting, OutOfMemory
from knowgate.stats.metrics import auroc
from knowgate.training.fit_function import FitProgress, FitProgressCallback
from knowgate.training.judges import checkpoint
from knowgate.training.judges.checkpoint import BEST_FOLDER, DevEvaluation, TrainingSegment, TrainingState
from knowgate.training.judges.trainable_models import TrainableModel, TrainingExample
from knowgate.training.judges.training_options import JudgeTrainingOptions

MAX_GRADIENT_NORM = 1.0
MAX_SKIPPED_SHARE = 0.5  # of the updates of a segment; a training that skips more has diverged
DEV_BATCH = 32
OUT_OF_MEMORY_MESSAGE = (
    "not enough GPU memory to train on a single example: end other programs that use the GPU, use a smaller `base`, or "
    "load it in fewer bits (bits=4). Finished segments are saved: the same command continues from there."
)


def format_dev_evaluation(dev: DevEvaluation) -> str:
    """Format dev loss and AUROC as the continuation of a line."""
    return f", dev loss {dev.loss:.4f}" + ("" if dev.auroc is None else f", dev AUROC {dev.auroc:.3f}")


@dataclass(frozen=True)
class TrainedJudge:
    """A trained judge and the record of its training.

    Attributes:
        folder: Folder with the files of the best weights.
        state: Losses of each segment (part of an epoch) of the training.
        training: Hyperparameters.
        base_fingerprint: Hash of the weights that the training started from.
        n_examples: Number of training examples.
        n_dropped: Number of examples that were left out because they are too long.
        notes: Notes on the base for the model card.
    """

    folder: Path
    state: TrainingState
    training: JudgeTrainingOptions
    base_fingerprint: str
    n_examples: int
    n_dropped: int
    notes: Sequence[str]

    def describe(self) -> list[str]:
        """Describe the training for the model card, one line per segment.

        A segment ends with an evaluation on the dev split. With two segments per epoch, the lines begin with "epoch 0.5",
        "epoch 1", "epoch 1.5".
        """
        state = self.state
        lines = []
        for number, loss in enumerate(state.losses):
            line = f"epoch {(number + 1) / self.training.checks:g}: loss {loss:.4f}"
            if state.dev_losses:
                line += format_dev_evaluation(DevEvaluation(state.dev_losses[number], state.dev_aurocs[number]))
            lines.append(line)
        best_epoch = (state.best + 1) / self.training.checks
        lines.append(f"kept: epoch {best_epoch:g}; trained for {state.seconds:.0f} s")
        if state.n_done < self.training.n_segments:
            lines.append(f"stopped early: {self.training.patience} dev evaluations brought no lower loss")
        if state.skipped:
            lines.append(f"{state.skipped} updates were skipped: their gradients were not finite")
        return lines


def train_judge(
    model: TrainableModel,
    examples: Sequence[TrainingExample],
    dev: Sequence[TrainingExample],
    training: JudgeTrainingOptions,
    work: Path,
    watch: FitProgressCallback,
) -> TrainedJudge:
    """Train a model as a judge, or continue an interrupted training.

    Args:
        model: The model. It is modified; load the judge from the returned files.
        examples: Training examples. Those that are longer than `training.max_tokens` are left out, because the longest
            one determines the memory of a batch.
        dev: Examples that choose the best weights and decide when to stop; may be empty.
        training: Hyperparameters.
        work: Folder for checkpoints, which may hold an interrupted training.
        watch: Called with the progress.
    """
    usable = [example for example in examples if len(example.prompt.ids) <= training.max_tokens]
    usable_dev = [example for example in dev if len(example.prompt.ids) <= training.max_tokens]
    if not usable:
        raise BadInput(
            f"all {len(examples)} training examples have more than {training.max_tokens} tokens. Set `tokens` lower, show "
            "fewer passages, or label more questions."
        )
    run = _TrainingRun(model, usable, usable_dev, training, work, watch)
    state = checkpoint.load_training_state(work, run.compute_key())
    if not state.is_finished(training):
        state = run.run(state)
    n_dropped = len(examples) - len(usable) + len(dev) - len(usable_dev)
    return TrainedJudge(work / BEST_FOLDER, state, training, model.fingerprint, len(usable), n_dropped, model.notes)


@dataclass
class _TrainingRun:
    """A training of a judge. It continues from the last checkpoint, if there is one.

    Attributes:
        model: The model to train.
        examples: The training examples.
        dev: Examples to evaluate the model on after each segment (part of an epoch); may be empty.
        training: Hyperparameters.
        work: Working folder, for checkpoints.
        watch: Called with the progress.
        parameters: The trained tensors; set by `run`.
        optimizer: Their optimizer; set by `run`.
        portion_size: Number of examples that are computed at once; lowered when memory is short.
    """

    model: TrainableModel
    examples: Sequence[TrainingExample]
    dev: Sequence[TrainingExample]
    training: JudgeTrainingOptions
    work: Path
    watch: FitProgressCallback
    parameters: list[Any] = field(default_factory=list)
    optimizer: Any = None
    portion_size: int = 0

    def compute_key(self) -> str:
        """Compute a hash of model, data and settings, so that only this training is continued."""
        rows = [f"{each.prompt.ids}{each.prompt.positions}{each.targets}" for each in (*self.examples, *self.dev)]
        return sha256_text(self.model.fingerprint, repr(asdict(self.training)), str(len(self.dev)), *rows)

    def run(self, state: TrainingState) -> TrainingState:
        """Train until the state is finished."""
        import torch

        torch.manual_seed(self.training.seed)
        self.portion_size = self.training.batch
        self.parameters = self.model.prepare(self.training)
        rate, decay = self.training.peak_rate, self.training.weight_decay
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, weight_decay=decay)
        if state.n_done:  # continue an interrupted training
            checkpoint.restore_checkpoint(self.work, state, self.parameters, self.optimizer)
        while not state.is_finished(self.training):
            segment = self._train_segment(state.n_done)
            dev = self._evaluate() if self.dev else None
            state = state.add(segment, dev)
            self._save(state)
            self._report_segment(state.n_done / self.training.checks, segment, dev)
        return state

    def _report_segment(self, epoch: float, segment: TrainingSegment, dev: DevEvaluation | None) -> None:
        """Report the end of a segment. Without dev rows, `dev` is None."""
        evaluation = "" if dev is None else format_dev_evaluation(dev)
        words = f"epoch {epoch:g}, loss {segment.loss:.3f}{evaluation}, {segment.rate:.1f} examples/s"
        self._report(round(epoch * len(self.examples)), words, is_end=True)

    def _report(self, done: int, words: str, *, is_end: bool = False) -> None:
        """Report the number of processed examples. `is_end` marks the end of a segment."""
        total = self.training.epochs * len(self.examples)
        self.watch(FitProgress(done, total, "examples", "training", words, is_end))

    def _save(self, state: TrainingState) -> None:
        """Save a checkpoint after a segment (part of an epoch), and the judge if the segment is the best one so far."""
        is_finished = state.is_finished(self.training)
        # Without dev rows, no segment is known to be better, so the judge is saved at the end.
        is_best = state.best == state.n_done - 1 if state.dev_losses else is_finished
        if is_best:
            with atomic_folder(self.work / BEST_FOLDER) as folder:
                self.model.save(folder)
        if is_finished:
            checkpoint.save_final_state(self.work, state)
        else:
            checkpoint.save_checkpoint(self.work, state, self.parameters, self.optimizer)

    def _train_segment(self, number: int) -> TrainingSegment:
        """Train one segment: the part of an epoch between two evaluations on the dev split.

        The seeds depend on the number of the segment, so that an interrupted segment can be repeated.

        Raises:
            BadSetting: The training diverged: most updates had gradients that are not finite.
        """
        import torch

        self.model.set_training(True)
        epoch, part = divmod(number, self.training.checks)  # an epoch has as many segments as checks (evaluations)
        batches = self._shuffle_epoch(epoch)
        # The segment has the batches from `first` up to but not including `end`.
        first = round(len(batches) * part / self.training.checks)
        end = round(len(batches) * (part + 1) / self.training.checks)
        torch.manual_seed(self.training.seed * 1_000_003 + number)  # dropout differs by seed and segment
        start = time.perf_counter()
        losses: list[float] = []
        n_seen = 0
        speed = 0.0  # in examples per second
        for i in range(first, end):
            self._set_learning_rate(epoch * len(batches) + i, len(batches) * self.training.epochs)
            losses.append(self._update([self.examples[index] for index in batches[i]]))
            n_seen += len(batches[i])
            speed = n_seen / max(1e-9, time.perf_counter() - start)
            done = epoch * len(self.examples) + i * self.training.batch + len(batches[i])
            self._report(done, f"epoch {epoch + 1}, loss {losses[-1]:.3f}, {speed:.1f} examples/s")
        finite = _select_finite(losses)
        mean_loss = float(np.mean(finite or [0.0]))
        return TrainingSegment(mean_loss, speed, len(losses) - len(finite), time.perf_counter() - start)

    def _set_learning_rate(self, update: int, updates: int) -> None:
        """Set the learning rate of one update. `updates` is the total number."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.compute_rate(update, updates)

    def _shuffle_epoch(self, epoch: int) -> list[Sequence[int]]:
        """Shuffle all examples and cut them into batches of indices.

        Examples of similar length share a batch, to save padding.
        """
        import torch

        generator = torch.Generator().manual_seed(self.training.seed * 1_000 + epoch)  # each epoch has another order
        order = torch.randperm(len(self.examples), generator=generator).tolist()
        batches: list[Sequence[int]] = []
        for window in split_batches(order, self.training.batch * self.training.window):
            if self.training.window > 1:
                window = sorted(window, key=lambda index: len(self.examples[index].prompt.ids))
            window_batches = list(split_batches(window, self.training.batch))
            batch_order = torch.randperm(len(window_batches), generator=generator).tolist()
            batches += [window_batches[i] for i in batch_order]
        return batches

    def _update(self, batch: Sequence[TrainingExample]) -> float:
        """Update the weights once and return the loss.

        When memory is short, the batch is computed in smaller portions.

        Raises:
            OutOfMemory: Not even a single example fits into memory.
        """
        import torch

        from knowgate.models.hf.batching import is_memory_error

        while True:
            try:
                return self._step(batch)
            except RuntimeError as error:
                if not is_memory_error(error):
                    raise
                if self.portion_size == 1:
                    raise OutOfMemory(OUT_OF_MEMORY_MESSAGE) from error
            self.portion_size = math.ceil(self.portion_size / 2)
            # Free the memory that the failed update has left allocated.
            self.optimizer.zero_grad()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _step(self, batch: Sequence[TrainingExample]) -> float:
        """Compute the gradients of a batch in portions, and update the weights.

        Returns:
            The loss of the batch. NaN if a gradient is not finite; the weights are not updated then.
        """
        import torch

        self.optimizer.zero_grad()
        total = 0.0
        for portion in split_batches(batch, self.portion_size):
            loss = self.model.compute_output(portion).loss * (len(portion) / len(batch))
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRADIENT_NORM)
        if not (math.isfinite(total) and bool(torch.isfinite(norm))):
            return math.nan
        self.optimizer.step()
        return total

    def _evaluate(self) -> DevEvaluation:
        """Compute the judge's mean loss and AUROC on the dev examples."""
        import torch

        self.model.set_training(False)
        total_loss = 0.0
        margins: list[float] = []
        with torch.no_grad():
            for batch in split_batches(self.dev, DEV_BATCH):
                output = self.model.compute_output(batch)
                total_loss += float(output.loss) * len(batch)
                margins += output.margins.tolist()
        # An example may have several targets. The margin is that of the last one.
        truth = np.array([example.targets[-1] >= 0.5 for example in self.dev])
        return DevEvaluation(total_loss / len(self.dev), auroc(truth, np.array(margins)))


def _select_finite(losses: Sequence[float]) -> list[float]:
    """Select the finite losses. Updates with other losses were skipped.

    Raises:
        BadSetting: Most losses are not finite, so the training diverged.
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < (1 - MAX_SKIPPED_SHARE) * len(losses):
        raise BadSetting(
            f"the training diverged: {len(losses) - len(finite)} of {len(losses)} updates had NaN or infinite gradients. Use a "
            "smaller `learning_rate`."
        )
    return finite
