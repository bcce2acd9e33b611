"""A file of hidden states as vLLM's connector writes it, read and then deleted. Knows nothing of requests.

vLLM 0.32 (distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py): safetensors with `hidden_states`
[tokens, layers, width] and `token_ids` [tokens], written behind an exclusive flock on the file's name + '.lock', which
is there before the reply comes. The name comes from the server, so only its last part counts: a server can name files
of the folder we were given, and none elsewhere.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import ModelError, NotOffered
from knowgate.types import Vector

REPLY = re.compile(r"[\w-]{8,100}")
NAME = re.compile(r"[\w.-]{1,240}\.safetensors")
LONGEST_HEADER = 1 << 20
WAIT = 30.0  # seconds for the server to have written a file
PAUSE = 0.005
NUMBERS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # of BF16 the bits: numpy has no such numbers


@dataclass(frozen=True)
class EndStates:
    """The states of the last token, layers x width, and all token ids."""

    states: Vector
    token_ids: list[int]


def take_states(folder: Path, told: str, *, wait: float = WAIT) -> EndStates:
    """What lies in the file that the server told of; it is gone afterwards."""
    file = located(folder, told)
    lock = file.with_name(file.name + ".lock")
    try:
        _await(file, lock, time.monotonic() + wait)
        with file.open("rb") as stream:
            return _read(stream)
    except OSError as error:
        raise ModelError(f"the server's hidden states in '{file}' cannot be read: {error.strerror or error}.") from None
    finally:
        drop(file, lock)


def drop_states(folder: Path, reply: str, *, wait: float = WAIT) -> None:
    """Delete what was written for the request whose reply has this id; of several choices, for each of them."""
    if not REPLY.fullmatch(reply):
        return
    for lock in folder.glob(f"*{reply}-*.safetensors.lock"):
        file = lock.with_suffix("")
        try:
            _await(file, lock, time.monotonic() + wait)
        except (OSError, ModelError):  # somebody else has it, or it will never be written
            continue
        finally:
            drop(file, lock)


def located(folder: Path, told: str) -> Path:
    """The file of this name in the folder, wherever the server has it."""
    name = PureWindowsPath(PurePosixPath(told).name).name
    if not NAME.fullmatch(name):
        raise ModelError("the server names a file of hidden states that is none.")
    return folder / name


def drop(*files: Path) -> None:
    """Whoever serves may keep them for itself: a folder we may not write to is no reason to fail."""
    for file in files:
        try:
            file.unlink(missing_ok=True)
        except OSError:
            continue


def _await(file: Path, lock: Path, end: float) -> None:
    """Until nobody writes it any more; where there is no lock, until it is there."""
    while not (lock.exists() or file.exists()):
        if time.monotonic() > end:
            raise ModelError(
                f"the server says that it wrote hidden states, but '{file.name}' does not appear in '{file.parent}'. "
                "Give the folder of its shared_storage_path, as it is called on this machine: #layers=...&storage=DIR"
            )
        time.sleep(PAUSE)
    if not lock.exists():
        return
    try:
        import fcntl
    except ImportError:
        raise NotOffered("hidden states of a vLLM server cannot be awaited on Windows. Use WSL, or SGLang.") from None
    with lock.open("rb") as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ModelError(f"the server did not finish writing '{file.name}'. Check its log.") from None
                time.sleep(PAUSE)


def _read(stream: BinaryIO) -> EndStates:
    try:
        header = _header(stream)
        start = stream.tell()
        ids = _numbers(stream, start, header["token_ids"], {"I64": "<i8", "I32": "<i4"}, ...)
        states = _numbers(stream, start, header["hidden_states"], NUMBERS, -1)
        tokens, layers, width = header["hidden_states"]["shape"]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ModelError("the server's file of hidden states is damaged or of an unknown form.") from None
    if tokens != len(ids) or not tokens:
        raise ModelError(f"the server's file has states of {tokens} tokens and {len(ids)} token ids.")
    found: Vector = states.reshape(layers, width).astype(np.float32)
    if not np.isfinite(found).all():
        raise ModelError("the server gave NaN or infinite hidden states: its weights or number format are bad.")
    return EndStates(found, [int(token) for token in ids])


def _header(stream: BinaryIO) -> dict[str, Any]:
    size = int.from_bytes(stream.read(8), "little")
    if not 0 < size <= LONGEST_HEADER:
        raise ValueError("no header")
    header: dict[str, Any] = json.loads(stream.read(size))
    return header


def _numbers(stream: BinaryIO, start: int, entry: Any, kinds: dict[str, str], row: Any) -> NDArray[Any]:
    """A tensor, or of its first axis only the last entry (`row` -1): states of long prompts are large."""
    kind, shape = np.dtype(kinds[entry["dtype"]]), [int(size) for size in entry["shape"]]
    begin, end = entry["data_offsets"]
    count = math.prod(shape)
    if count * kind.itemsize != end - begin or begin < 0:
        raise ValueError("sizes differ")
    if row == -1:
        count = math.prod(shape[1:])
        begin = end - count * kind.itemsize
    stream.seek(start + begin)
    values = np.frombuffer(stream.read(count * kind.itemsize), kind)
    if len(values) != count:
        raise ValueError("cut off")
    if entry["dtype"] == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values
