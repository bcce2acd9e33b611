"""Hidden states of a label run in safetensors shards: one file per batch, one row per question.

The name of a shard contains a digest of its content, so that no name is ever used for two contents.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from knowgate.core.files import write_bytes
from knowgate.errors import BadInput
from knowgate.types import Vector

SHARD_NAME = re.compile(r"vectors-(\d{1,12})(-[0-9a-f]{1,64})?\.safetensors")
STATE_NAME = re.compile(r"(before|after)\.-?\d{1,6}")
DIGEST_DIGITS = 16


def list_shards(folder: Path) -> Iterator[Path]:
    """Yield the shard files of a run, in order."""
    return (path for path in sorted(folder.glob("vectors-*.safetensors")) if SHARD_NAME.fullmatch(path.name))


def write_shard(folder: Path, states: Mapping[str, Vector]) -> str:
    """Write a new shard and return its name; an existing file is never overwritten."""
    data = save({name: np.ascontiguousarray(block) for name, block in states.items()})
    numbers = [int(match[1]) for path in list_shards(folder) if (match := SHARD_NAME.fullmatch(path.name))]
    digest = hashlib.sha256(data).hexdigest()[:DIGEST_DIGITS]
    name = f"vectors-{max(numbers, default=-1) + 1:07d}-{digest}.safetensors"
    if (folder / name).exists():
        raise FileExistsError(17, "the file exists already", name)
    write_bytes(folder / name, data)
    return name


def read_shard(path: Path) -> dict[str, Vector]:
    """Read and validate all states of a shard."""
    if not SHARD_NAME.fullmatch(path.name):
        raise BadInput(f"not a file of hidden states: '{path.name[:80]}'.")
    try:
        states: dict[str, Vector] = load_file(path)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise BadInput(f"the hidden states in {path.name} cannot be read: {_get_first_line(error)}.") from None
    for name, block in states.items():
        if block.ndim != 2 or not np.issubdtype(block.dtype, np.floating) or not np.isfinite(block).all():
            raise BadInput(f"the hidden states '{name[:80]}' in {path.name} are not rows of numbers.")
    if len({len(block) for block in states.values()}) > 1:
        raise BadInput(f"the hidden states in {path.name} differ in their number of rows.")
    return states


def list_state_names(path: Path) -> list[str]:
    """List the states of a shard without reading them."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise BadInput(f"the hidden states in {path.name} cannot be read: {_get_first_line(error)}.") from None
    if invalid := [name for name in names if not STATE_NAME.fullmatch(name)]:
        raise BadInput(f"{path.name} holds '{invalid[0][:80]}', which is not a name of hidden states.")
    return names


def digest_states(question_id: str, states: Mapping[str, Vector], index: int) -> str:
    """Compute a digest of a question id and its row of a shard, to detect mixed-up rows."""
    digest = hashlib.sha256(question_id.encode(errors="surrogatepass"))
    for name in sorted(states):
        digest.update(f"|{name}|{states[name].dtype}|{states[name].shape[1:]}|".encode())
        digest.update(np.ascontiguousarray(states[name][index]).tobytes())
    return digest.hexdigest()[:DIGEST_DIGITS]


def _get_first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
