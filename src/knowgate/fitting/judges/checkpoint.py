"""Where a training stands, on disk: safetensors and JSON, written whole after each epoch, so that it can go on.

Knows nothing of what is trained beyond its parameters and Adam's moments.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from knowgate.doors import read_json
from knowgate.errors import ArtefactError, BadInput, BadSetting
from knowgate.files import new_folder, write_json
from knowgate.folders import check_digests, file_digests
from knowgate.typed import read_record

STATE, WEIGHTS, MOMENTS, BEST = "training.json", "weights.safetensors", "moments.safetensors", "best"


@dataclass(frozen=True)
class TrainingState:
    """Epochs finished so far: their training and dev losses."""

    key: str
    losses: tuple[float, ...] = ()
    dev_losses: tuple[float, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict, compare=False)  # digests of the last epoch's

    @property
    def epochs(self) -> int:
        return len(self.losses)

    @property
    def best(self) -> int:
        """The epoch to keep, from 0: that of the lowest dev loss; the last where there are no dev rows."""
        if not self.dev_losses:
            return self.epochs - 1
        return min(range(len(self.dev_losses)), key=lambda epoch: self.dev_losses[epoch])

    def after(self, loss: float, dev_loss: float | None) -> TrainingState:
        more = () if dev_loss is None else (dev_loss,)
        return TrainingState(self.key, (*self.losses, loss), (*self.dev_losses, *more))


def training_folder(out: Path) -> Path:
    """Where an unfinished training of this artefact is kept."""
    return out.with_name(f"{out.name}.training")


def forget_training(out: Path) -> None:
    """The artefact is written: what would have let its training go on is not needed any more."""
    shutil.rmtree(training_folder(out), ignore_errors=True)


def begun(work: Path, key: str) -> TrainingState:
    """How far the training in this folder is; another training's folder is refused."""
    if not (work / STATE).is_file():
        return TrainingState(key)
    try:
        found = read_record(TrainingState, read_json(work / STATE), STATE)
    except BadInput as error:
        raise _damaged(work, str(error)) from None
    if found.key != key:
        raise BadSetting(
            f"'{work}' holds an unfinished training with other data or settings. Run that one to its end, delete the "
            "folder, or use another --out."
        )
    return found


def keep(work: Path, done: TrainingState, parameters: Sequence[Any], optimiser: Any) -> None:
    """Write the state after an epoch; the note that counts it comes last, so a killed run repeats the epoch."""
    from safetensors.torch import save_file

    with new_folder(_epoch(work, done.epochs)) as folder:
        save_file({str(i): value.detach().contiguous() for i, value in enumerate(parameters)}, folder / WEIGHTS)
        moments = optimiser.state_dict()["state"]
        flat = {f"{i}.{name}": value for i, values in moments.items() for name, value in values.items()}
        save_file(flat, folder / MOMENTS)
        digests = file_digests(folder)
    note = {"key": done.key, "losses": list(done.losses), "dev_losses": list(done.dev_losses), "files": digests}
    write_json(work / STATE, note)
    shutil.rmtree(_epoch(work, done.epochs - 1), ignore_errors=True)


def restore(work: Path, done: TrainingState, parameters: Sequence[Any], optimiser: Any) -> None:
    """Put weights and moments back to where the last whole epoch left them."""
    import torch
    from safetensors.torch import load_file

    folder = _epoch(work, done.epochs)
    check_digests(folder, done.files, lambda problem: _damaged(work, problem))
    state: dict[int, dict[str, Any]] = {}
    try:
        weights = load_file(folder / WEIGHTS)
        with torch.no_grad():
            for i, parameter in enumerate(parameters):
                parameter.copy_(weights[str(i)])
        for name, value in load_file(folder / MOMENTS).items():
            place, _, moment = name.partition(".")
            state.setdefault(int(place), {})[moment] = value
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise _damaged(work, (str(error).splitlines() or [""])[0]) from None
    optimiser.load_state_dict({**optimiser.state_dict(), "state": state})


def _damaged(work: Path, problem: str) -> ArtefactError:
    return ArtefactError(
        f"the unfinished training in '{work}' cannot go on: {problem.rstrip('.')}. Delete that folder to begin anew."
    )


def _epoch(work: Path, number: int) -> Path:
    return work / f"epoch-{number}"
