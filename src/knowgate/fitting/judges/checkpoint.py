"""Where a training stands, on disk: safetensors and JSON, written whole after each epoch, so that it can go on.

Knows nothing of what is trained beyond its parameters and Adam's moments.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knowgate.doors import read_json
from knowgate.errors import BadSetting
from knowgate.files import new_folder, write_json

STATE, WEIGHTS, MOMENTS, BEST = "training.json", "weights.safetensors", "moments.safetensors", "best"


@dataclass(frozen=True)
class TrainingState:
    """Epochs finished so far: their training and dev losses."""

    key: str
    losses: tuple[float, ...] = ()
    dev_losses: tuple[float, ...] = ()

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
    found = read_json(work / STATE)
    if found["key"] != key:
        raise BadSetting(
            f"'{work}' holds an unfinished training with other data or settings. Run that one to its end, delete the "
            "folder, or use another --out."
        )
    return TrainingState(key, tuple(found["losses"]), tuple(found["dev_losses"]))


def keep(work: Path, done: TrainingState, parameters: Sequence[Any], optimiser: Any) -> None:
    """Write the state after an epoch; the note that counts it comes last, so a killed run repeats the epoch."""
    from safetensors.torch import save_file

    with new_folder(_epoch(work, done.epochs)) as folder:
        save_file({str(i): value.detach().contiguous() for i, value in enumerate(parameters)}, folder / WEIGHTS)
        moments = optimiser.state_dict()["state"]
        flat = {f"{i}.{name}": value for i, values in moments.items() for name, value in values.items()}
        save_file(flat, folder / MOMENTS)
    note = {"key": done.key, "losses": list(done.losses), "dev_losses": list(done.dev_losses)}
    write_json(work / STATE, note)
    shutil.rmtree(_epoch(work, done.epochs - 1), ignore_errors=True)


def restore(work: Path, done: TrainingState, parameters: Sequence[Any], optimiser: Any) -> None:
    """Put weights and moments back to where the last whole epoch left them."""
    import torch
    from safetensors.torch import load_file

    weights = load_file(_epoch(work, done.epochs) / WEIGHTS)
    with torch.no_grad():
        for i, parameter in enumerate(parameters):
            parameter.copy_(weights[str(i)])
    state: dict[int, dict[str, Any]] = {}
    for name, value in load_file(_epoch(work, done.epochs) / MOMENTS).items():
        place, _, moment = name.partition(".")
        state.setdefault(int(place), {})[moment] = value
    optimiser.load_state_dict({**optimiser.state_dict(), "state": state})


def _epoch(work: Path, number: int) -> Path:
    return work / f"epoch-{number}"
