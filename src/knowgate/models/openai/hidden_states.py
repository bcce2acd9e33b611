"""Hidden states from a server that was started to give them: those at the last token of what it is shown.

vLLM writes them into a folder that both machines see (`states_file`), for every request; what nobody reads is deleted.
SGLang 0.5.23 (managers/scheduler_components/batch_result_processor.py, layers/logits_processor.py) gives them in the
reply of POST /generate: with `return_hidden_states` "last", meta_info.hidden_states is one list of numbers, the layers
of --return-aux-hidden-state-layer-ids side by side, or the last layer where none are named. Its layer i is
transformers' i + 1.

Prompts go out as token ids, as the server's own tokeniser gave them, so that a state is that of the very tokens.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadSetting, ModelError, NotOffered
from knowgate.models.openai.labels import NEUTRAL_SAMPLING
from knowgate.models.openai.server import ServedModel, call_native_endpoint, tokenize_prompt
from knowgate.models.openai.spec import HiddenStateConfig
from knowgate.types import Prompt, SignalRequest, Vector

RESPONSE_ID_PATTERN = re.compile(r"[\w-]{8,100}")
FILE_NAME_PATTERN = re.compile(r"[\w.-]{1,240}\.safetensors")
MAX_HEADER_BYTES = 1 << 20
FILE_TIMEOUT = 30.0  # seconds for the server to have written a file
POLL_INTERVAL = 0.005
FLOAT_FORMATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # of BF16 the bits: numpy has no such numbers


@dataclass(frozen=True)
class LastTokenStates:
    """The states of the last token, layers x width, and all token ids."""

    states: Vector
    token_ids: list[int]


def consume_states_file(folder: Path, told: str, *, wait: float = FILE_TIMEOUT) -> LastTokenStates:
    """What lies in the file that the server told of; it is gone afterwards."""
    file = locate_states_file(folder, told)
    lock = file.with_name(file.name + ".lock")
    try:
        _await(file, lock, time.monotonic() + wait)
        with file.open("rb") as stream:
            return _read(stream)
    except OSError as error:
        raise ModelError(f"the server's hidden states in '{file}' cannot be read: {error.strerror or error}.") from None
    finally:
        delete_files(file, lock)


def delete_states_files(folder: Path, reply: str, *, wait: float = FILE_TIMEOUT) -> None:
    """Delete what was written for the request whose reply has this id; of several choices, for each of them."""
    if not RESPONSE_ID_PATTERN.fullmatch(reply):
        return
    for lock in folder.glob(f"*{reply}-*.safetensors.lock"):
        file = lock.with_suffix("")
        try:
            _await(file, lock, time.monotonic() + wait)
        except (OSError, ModelError):  # somebody else has it, or it will never be written
            continue
        finally:
            delete_files(file, lock)


def locate_states_file(folder: Path, told: str) -> Path:
    """The file of this name in the folder, wherever the server has it."""
    name = PureWindowsPath(PurePosixPath(told).name).name
    if not FILE_NAME_PATTERN.fullmatch(name):
        raise ModelError("the server names a file of hidden states that is none.")
    return folder / name


def delete_files(*files: Path) -> None:
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
        time.sleep(POLL_INTERVAL)
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
                time.sleep(POLL_INTERVAL)


def _read(stream: BinaryIO) -> LastTokenStates:
    try:
        header = _header(stream)
        start = stream.tell()
        ids = _numbers(stream, start, header["token_ids"], {"I64": "<i8", "I32": "<i4"}, ...)
        states = _numbers(stream, start, header["hidden_states"], FLOAT_FORMATS, -1)
        tokens, layers, width = header["hidden_states"]["shape"]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ModelError("the server's file of hidden states is damaged or of an unknown form.") from None
    if tokens != len(ids) or not tokens:
        raise ModelError(f"the server's file has states of {tokens} tokens and {len(ids)} token ids.")
    found: Vector = states.reshape(layers, width).astype(np.float32)
    if not np.isfinite(found).all():
        raise ModelError("the server gave NaN or infinite hidden states: its weights or number format are bad.")
    return LastTokenStates(found, [int(token) for token in ids])


def _header(stream: BinaryIO) -> dict[str, Any]:
    size = int.from_bytes(stream.read(8), "little")
    if not 0 < size <= MAX_HEADER_BYTES:
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


LayerStates = Mapping[int, Vector]
SETUP_HINT = "docs/runtimes.md says how to start the server for it"


@dataclass(frozen=True)
class StatesAroundDraft:
    """The states at the last token of a prompt, and at that of its draft."""

    before: LayerStates
    after: LayerStates


class HiddenStateReader:
    """The states that one server gives, by the numbers of their layers."""

    def __init__(self, server: ServedModel, given: HiddenStateConfig):
        self._server = server
        self._given = given

    @property
    def depth(self) -> int:
        return self._given.depth

    def check(self, layers: Sequence[int]) -> None:
        """Refuse layers that the server was not started for, and servers that give none."""
        lacking = [layer for layer in layers if layer % self.depth not in self._given.layers]
        if lacking:
            there = ", ".join(map(str, self._given.layers))
            raise NotOffered(
                f"layer {lacking[0]} is asked for, and the server gives {there}. Start it with that layer, and name "
                "all of them behind its URL: #layers=..."
            )
        if self._server.maker not in ("vllm", "sglang"):
            raise NotOffered(
                f"the server of openai:{self._server.model} calls itself '{self._server.maker}': hidden states come "
                "from servers of vLLM and SGLang, and from models in this process."
            )
        if self._server.maker == "vllm" and self._given.storage is None:
            raise BadSetting(
                "vLLM writes hidden states into a folder: name its shared_storage_path, as it is called on this "
                "machine, behind the server's URL: #layers=...&storage=DIR"
            )

    def around(self, prompt: Prompt, draft: Sequence[int], want: SignalRequest) -> StatesAroundDraft:
        """draft: the token ids of the draft, without the token that ended it."""
        ids = [*tokenize_prompt(self._server, prompt)]
        before = self._named(self._at_end(ids), want.layers)
        if not want.after_draft:
            return StatesAroundDraft(before, {})
        return StatesAroundDraft(before, self._named(self._at_end([*ids, *draft]), want.layers) if draft else before)

    def forget(self, reply: str) -> None:
        """Delete what vLLM wrote for a request whose states nobody asked for, by the id of its reply."""
        if self._given.storage is not None:
            delete_states_files(self._given.storage, reply)

    def _named(self, states: Vector, wanted: Sequence[int]) -> LayerStates:
        places = {layer: place for place, layer in enumerate(self._given.layers)}
        return {layer: states[places[layer % self.depth]] for layer in wanted}

    def _at_end(self, ids: list[int]) -> Vector:
        states = self._from_sglang(ids) if self._server.maker == "sglang" else self._from_vllm(ids)
        if len(states) != len(self._given.layers):
            raise BadSetting(
                f"the server gives hidden states of {len(states)} layers, and {len(self._given.layers)} are named "
                f"behind its URL ({', '.join(map(str, self._given.layers))}). Name those it was started with, in their "
                "order."
            )
        return states

    def _from_vllm(self, ids: list[int]) -> Vector:
        reply = self._server.complete(ids, {**NEUTRAL_SAMPLING, "max_tokens": 1}, keep=True)
        told = _told(reply)
        if told is None or self._given.storage is None:
            raise NotOffered(f"openai:{self._server.model} gave no hidden states; {SETUP_HINT}.")
        found = consume_states_file(self._given.storage, told)
        if found.token_ids != ids:
            raise ModelError("the server's hidden states are those of other tokens than were sent.")
        return found.states

    def _from_sglang(self, ids: list[int]) -> Vector:
        body: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": {**NEUTRAL_SAMPLING, "max_new_tokens": 1},
            "return_hidden_states": "last",
        }
        adapter = {"lora_path": self._server.adapter} if self._server.adapter else {}
        reply = call_native_endpoint(self._server.wire.post_beside, "/generate", {**body, **adapter})
        try:
            given = reply["meta_info"].get("hidden_states")
            if given is None:
                raise NotOffered(f"openai:{self._server.model} gave no hidden states; {SETUP_HINT}.")
            row = np.array(given[-1], dtype=np.float32)
            if row.ndim != 1 or not row.size or row.size % len(self._given.layers):
                raise BadSetting(
                    f"the server gives {row.size} numbers a token, which are not those of {len(self._given.layers)} "
                    "layers. Name the layers it was started with, in their order."
                )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise ModelError("the server's reply has hidden states of an unknown form.") from None
        if not np.isfinite(row).all():
            raise ModelError("the server gave NaN or infinite hidden states: its weights or number format are bad.")
        return row.reshape(len(self._given.layers), -1)


def _told(reply: Any) -> str | None:
    """The file a reply tells of."""
    given = reply.get("kv_transfer_params") if isinstance(reply, dict) else None
    told = given.get("hidden_states_path") if isinstance(given, dict) else None
    return told if isinstance(told, str) else None
