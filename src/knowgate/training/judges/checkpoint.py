"""Where a training stands, on disk: safetensors and JSON, written whole after each leg, so that it can go on.

Knows nothing of what is trained beyond its parameters and Adam's moments.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from safetensors import SafetensorError

from knowgate.core.artifacts import check_digests, compute_digests
from knowgate.core.files import atomic_folder, write_json
from knowgate.core.schema import NonNegativeInt, NumberRange, read_record
from knowgate.core.validation import read_json
from knowgate.errors import ArtifactError, BadInput, BadSetting

STATE_FILE, WEIGHTS_FILE, MOMENTS_FILE, BEST_FOLDER = (
    "training.json",
    "weights.safetensors",
    "moments.safetensors",
    "best",
)


@dataclass(frozen=True)
class TrainingState:
    """Legs finished so far (parts of an epoch, each with a look at the dev split behind it): losses, dev measures.

    skipped: updates left out because their gradients were no numbers.
    """

    key: str
    losses: tuple[float, ...] = ()
    dev_losses: tuple[float, ...] = ()
    dev_aurocs: tuple[float | None, ...] = ()
    skipped: NonNegativeInt = 0
    seconds: Annotated[float, NumberRange(0)] = 0.0
    files: Mapping[str, str] = field(default_factory=dict, compare=False)  # digests of the last leg's

    @property
    def legs(self) -> int:
        return len(self.losses)

    @property
    def best(self) -> int:
        """The leg to keep, from 0: that of the lowest dev loss; the last where there are no dev rows."""
        if not self.dev_losses:
            return self.legs - 1
        return min(range(len(self.dev_losses)), key=lambda leg: self.dev_losses[leg])

    def is_over(self, legs: int, patience: int) -> bool:
        """All legs are done, or so many brought no better dev loss."""
        if self.legs >= legs:
            return True
        settles = 2 * self.legs >= legs  # before, the rate is still high, and the loss may go up and come down again
        return bool(settles and patience and self.dev_losses and self.legs - 1 - self.best >= patience)

    def after(self, leg: TrainingSegment, dev: DevEvaluation | None) -> TrainingState:
        looked = () if dev is None else (dev,)
        return TrainingState(
            self.key,
            (*self.losses, leg.loss),
            (*self.dev_losses, *(look.loss for look in looked)),
            (*self.dev_aurocs, *(look.auroc for look in looked)),
            self.skipped + leg.skipped,
            self.seconds + leg.seconds,
        )


class TrainingSegment(NamedTuple):
    """What a part of the training came to."""

    loss: float
    rate: float  # examples a second
    skipped: int
    seconds: float


class DevEvaluation(NamedTuple):
    """A look at the dev split. auroc: of the first label; None where the lessons are all of one kind."""

    loss: float
    auroc: float | None


def checkpoint_folder(out: Path) -> Path:
    """Where an unfinished training of this artefact is kept."""
    return out.with_name(f"{out.name}.training")


def delete_checkpoint(out: Path) -> None:
    """The artefact is written: what would have let its training go on is not needed any more."""
    shutil.rmtree(checkpoint_folder(out), ignore_errors=True)


def load_training_state(work: Path, key: str) -> TrainingState:
    """How far the training in this folder is; another training's folder is refused."""
    if not (work / STATE_FILE).is_file():
        return TrainingState(key)
    try:
        found = read_record(TrainingState, read_json(work / STATE_FILE), STATE_FILE)
    except BadInput as error:
        raise _damaged(work, str(error)) from None
    if found.key != key:
        raise BadSetting(
            f"'{work}' holds an unfinished training with other data or settings. Run that one to its end, delete the "
            "folder, or use another --out."
        )
    return found


def save_checkpoint(work: Path, done: TrainingState, parameters: Sequence[Any], optimiser: Any) -> None:
    """Write the state after a leg; the note that counts it comes last, so a killed run repeats the leg."""
    from safetensors.torch import save_file

    with atomic_folder(_leg(work, done.legs)) as folder:
        save_file({str(i): value.detach().contiguous() for i, value in enumerate(parameters)}, folder / WEIGHTS_FILE)
        moments = optimiser.state_dict()["state"]
        flat = {f"{i}.{name}": value for i, values in moments.items() for name, value in values.items()}
        save_file(flat, folder / MOMENTS_FILE)
        digests = compute_digests(folder)
    write_json(work / STATE_FILE, {**asdict(done), "files": digests})
    shutil.rmtree(_leg(work, done.legs - 1), ignore_errors=True)


def save_final_state(work: Path, done: TrainingState) -> None:
    """The training is over: nobody will go on, so weights and moments are let go."""
    write_json(work / STATE_FILE, asdict(done))
    shutil.rmtree(_leg(work, done.legs - 1), ignore_errors=True)


def restore_checkpoint(work: Path, done: TrainingState, parameters: Sequence[Any], optimiser: Any) -> None:
    """Put weights and moments back to where the last whole leg left them."""
    import torch
    from safetensors.torch import load_file

    folder = _leg(work, done.legs)
    check_digests(folder, done.files, lambda problem: _damaged(work, problem))
    state: dict[int, dict[str, Any]] = {}
    try:
        weights = load_file(folder / WEIGHTS_FILE)
        with torch.no_grad():
            for i, parameter in enumerate(parameters):
                parameter.copy_(weights[str(i)])
        for name, value in load_file(folder / MOMENTS_FILE).items():
            place, _, moment = name.partition(".")
            state.setdefault(int(place), {})[moment] = value
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise _damaged(work, (str(error).splitlines() or [""])[0]) from None
    optimiser.load_state_dict({**optimiser.state_dict(), "state": state})


def _damaged(work: Path, problem: str) -> ArtifactError:
    return ArtifactError(
        f"the unfinished training in '{work}' cannot go on: {problem.rstrip('.')}. Delete that folder to begin anew."
    )


def _leg(work: Path, number: int) -> Path:
    return work / f"leg-{number}"
