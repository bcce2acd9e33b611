"""Checkpoints of a training: weights, optimizer state and progress, written atomically after each segment.

A segment is a part of an epoch that ends with an evaluation on the dev split.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from safetensors import SafetensorError

from knowgate.core.artifacts import check_digests, compute_digests
from knowgate.core.files import atomic_folder, write_json
from knowgate.core.schema import NonNegativeInt, NumberRange, read_record
from knowgate.core.validation import read_json
from knowgate.errors import ArtifactError, BadInput, BadSetting, get_cause
from knowgate.training.judges.training_options import JudgeTrainingOptions

STATE_FILE, BEST_FOLDER = "training.json", "best"
WEIGHTS_FILE, MOMENTS_FILE = "weights.safetensors", "moments.safetensors"


class TrainingSegment(NamedTuple):
    """The outcome of one training segment (part of an epoch).

    Attributes:
        loss: Mean training loss.
        rate: Examples per second.
        skipped: Updates that were skipped because a gradient was not finite.
        seconds: Training time.
    """

    loss: float
    rate: float
    skipped: int
    seconds: float


class DevEvaluation(NamedTuple):
    """Loss and AUROC on the dev split. Without two classes, the AUROC is None."""

    loss: float
    auroc: float | None


@dataclass(frozen=True)
class TrainingState:
    """The progress of a training after its finished segments (parts of an epoch).

    Attributes:
        key: Hash of data and hyperparameters, to recognize the checkpoint of the same training.
        losses: Training loss of each segment.
        dev_losses: Dev loss after each segment.
        dev_aurocs: Dev AUROC after each segment.
        skipped: Updates that were skipped because a gradient was not finite.
        seconds: Training time.
        files: Digests of the last checkpoint's files.
    """

    key: str
    losses: tuple[float, ...] = ()
    dev_losses: tuple[float, ...] = ()
    dev_aurocs: tuple[float | None, ...] = ()
    skipped: NonNegativeInt = 0
    seconds: Annotated[float, NumberRange(0)] = 0.0
    files: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def n_done(self) -> int:
        """Number of finished segments."""
        return len(self.losses)

    @property
    def best(self) -> int:
        """Index of the segment with the lowest dev loss. Without dev rows, the last one."""
        if not self.dev_losses:
            return self.n_done - 1
        return self.dev_losses.index(min(self.dev_losses))

    def is_finished(self, training: JudgeTrainingOptions) -> bool:
        """Return whether all segments are done or the dev loss no longer improves.

        Training never stops early in the first half.
        """
        if self.n_done >= training.n_segments:
            return True
        n_since_best = self.n_done - 1 - self.best
        # In the first half, the learning rate is high, and the loss may rise and fall.
        is_past_half = 2 * self.n_done >= training.n_segments
        return is_past_half and bool(self.dev_losses) and 0 < training.patience <= n_since_best

    def add(self, segment: TrainingSegment, dev: DevEvaluation | None) -> TrainingState:
        """Return the state after another segment. `dev` is None without dev rows."""
        losses = (*self.losses, segment.loss)
        skipped = self.skipped + segment.skipped
        seconds = self.seconds + segment.seconds
        state = replace(self, losses=losses, skipped=skipped, seconds=seconds, files={})  # no checkpoint has it yet
        if dev is None:
            return state
        return replace(state, dev_losses=(*self.dev_losses, dev.loss), dev_aurocs=(*self.dev_aurocs, dev.auroc))


def checkpoint_folder(out: Path) -> Path:
    """Return the folder for checkpoints of an artifact that is being trained."""
    return out.with_name(f"{out.name}.training")


def delete_checkpoint(out: Path) -> None:
    """Delete the checkpoints of an artifact after it was written."""
    shutil.rmtree(checkpoint_folder(out), ignore_errors=True)


def load_training_state(work: Path, key: str) -> TrainingState:
    """Load the progress of an interrupted training, or return a new state.

    Raises:
        BadSetting: The folder contains a training with other data or settings.
        ArtifactError: The file is damaged.
    """
    if not (work / STATE_FILE).is_file():
        return TrainingState(key)
    try:
        state = read_record(TrainingState, read_json(work / STATE_FILE), STATE_FILE)
    except BadInput as error:
        raise _make_damage_error(work, str(error)) from None
    if state.key != key:
        raise BadSetting(
            f"'{work}' contains an unfinished training run with other data or settings. Finish it, delete the folder, or set "
            "another `out`."
        )
    return state


def save_checkpoint(work: Path, state: TrainingState, parameters: Sequence[Any], optimizer: Any) -> None:
    """Save weights and optimizer state after a segment (part of an epoch).

    The previous checkpoint is deleted.

    Args:
        work: Folder for checkpoints.
        state: The progress after the segment.
        parameters: The trained tensors.
        optimizer: Their Adam optimizer.
    """
    from safetensors.torch import save_file

    with atomic_folder(_segment_folder(work, state.n_done)) as folder:
        weights = {str(i): value.detach().contiguous() for i, value in enumerate(parameters)}
        save_file(weights, folder / WEIGHTS_FILE)
        moments = optimizer.state_dict()["state"]  # Adam's tensors of each parameter, by name
        named_moments = {f"{i}.{name}": value for i, values in moments.items() for name, value in values.items()}
        save_file(named_moments, folder / MOMENTS_FILE)
        digests = compute_digests(folder)
    # Written last: if the process is killed before, the segment is repeated.
    write_json(work / STATE_FILE, {**asdict(state), "files": digests})
    shutil.rmtree(_segment_folder(work, state.n_done - 1), ignore_errors=True)


def save_final_state(work: Path, state: TrainingState) -> None:
    """Record that the training is finished and delete its last checkpoint."""
    write_json(work / STATE_FILE, asdict(state))
    shutil.rmtree(_segment_folder(work, state.n_done - 1), ignore_errors=True)


def restore_checkpoint(work: Path, state: TrainingState, parameters: Sequence[Any], optimizer: Any) -> None:
    """Load the last checkpoint into the parameters and the optimizer.

    Raises:
        ArtifactError: The checkpoint is damaged or incomplete.
    """
    import torch
    from safetensors.torch import load_file

    folder = _segment_folder(work, state.n_done)
    check_digests(folder, state.files, lambda problem: _make_damage_error(work, problem))
    moments: dict[int, dict[str, Any]] = {}
    try:
        weights = load_file(folder / WEIGHTS_FILE)
        with torch.no_grad():
            for i, parameter in enumerate(parameters):
                parameter.copy_(weights[str(i)])
        for name, value in load_file(folder / MOMENTS_FILE).items():
            index, _, moment = name.partition(".")  # such as '3.exp_avg', for the fourth parameter
            moments.setdefault(int(index), {})[moment] = value
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise _make_damage_error(work, get_cause(error)) from None
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})


def _make_damage_error(work: Path, problem: str) -> ArtifactError:
    """Build the error for a checkpoint that cannot be read."""
    return ArtifactError(
        f"the unfinished training in '{work}' cannot continue: {problem.rstrip('.')}. Delete that folder to start over."
    )


def _segment_folder(work: Path, number: int) -> Path:
    return work / f"leg-{number}"  # an old name of segments; unfinished trainings depend on it
