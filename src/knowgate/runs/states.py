"""Hidden states of a run in safetensors shards: one file per batch, one row in it per question.

A shard's name holds a digest of its content, so no name is ever used for two contents, whatever became of earlier
shards. Knows arrays and files; not what the states are used for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from knowgate.errors import BadInput
from knowgate.files import write_bytes
from knowgate.types import Vector

SHARD = re.compile(r"vectors-(\d{1,12})(-[0-9a-f]{1,64})?\.safetensors")
STATES = re.compile(r"(before|after)\.-?\d{1,6}")
DIGITS = 16  # of a digest


def shards(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.glob("vectors-*.safetensors")) if SHARD.fullmatch(path.name))


def write_shard(folder: Path, states: Mapping[str, Vector]) -> str:
    """A new shard; its name. A file that is there already is never overwritten."""
    data = save({name: np.ascontiguousarray(block) for name, block in states.items()})
    taken = [int(found[1]) for path in shards(folder) if (found := SHARD.fullmatch(path.name))]
    name = f"vectors-{max(taken, default=-1) + 1:07d}-{hashlib.sha256(data).hexdigest()[:DIGITS]}.safetensors"
    if (folder / name).exists():
        raise FileExistsError(17, "a file of a name that is not given twice is there", name)
    write_bytes(folder / name, data)
    return name


def read_shard(path: Path) -> dict[str, Vector]:
    """All states of a shard, if they are numbers and one row each for the same questions."""
    if not SHARD.fullmatch(path.name):
        raise BadInput(f"'{path.name[:80]}' is no name of a file of hidden states.")
    try:
        states: dict[str, Vector] = load_file(path)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise BadInput(f"the hidden states in {path.name} cannot be read: {_first_line(error)}.") from None
    for name, block in states.items():
        if block.ndim != 2 or not np.issubdtype(block.dtype, np.floating) or not np.isfinite(block).all():
            raise BadInput(f"the hidden states '{name[:80]}' in {path.name} are not rows of numbers.")
    if len({len(block) for block in states.values()}) > 1:
        raise BadInput(f"the hidden states in {path.name} are not of equally many questions.")
    return states


def state_names(path: Path) -> list[str]:
    """Which states a shard holds, without reading them."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise BadInput(f"the hidden states in {path.name} cannot be read: {_first_line(error)}.") from None
    if wrong := [name for name in names if not STATES.fullmatch(name)]:
        raise BadInput(f"{path.name} holds '{wrong[0][:80]}', which is no name of hidden states.")
    return names


def states_digest(question: str, states: Mapping[str, Vector], row: int) -> str:
    """Of a question's id and its row of a shard: neither another row nor another question has it."""
    digest = hashlib.sha256(question.encode(errors="surrogatepass"))
    for name in sorted(states):
        digest.update(f"|{name}|{states[name].dtype}|{states[name].shape[1:]}|".encode())
        digest.update(np.ascontiguousarray(states[name][row]).tobytes())
    return digest.hexdigest()[:DIGITS]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
