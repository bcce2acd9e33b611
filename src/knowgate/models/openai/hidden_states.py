"""Read the hidden states at the last token of a prompt from a vLLM or SGLang server.

The server must have been started with hidden states enabled; docs/runtimes.md describes how.

vLLM 0.32 (distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py) writes one safetensors file per
request into a folder that both machines can access. The file has the tensors `hidden_states` [tokens, layers, width] and
`token_ids` [tokens]. While vLLM writes, it holds an exclusive flock on a second file, with '.lock' added to the name,
which exists before the response arrives. This module deletes the files after reading them, and also the files of
requests whose states are not needed. The server reports the path of a file, but only the file name is used. So a server
cannot make this module read files outside the configured folder.

SGLang 0.5.23 (managers/scheduler_components/batch_result_processor.py, layers/logits_processor.py) returns the states in
the response of POST /generate. With `return_hidden_states` "last", meta_info.hidden_states is one list of numbers. It
contains the layers of --return-aux-hidden-state-layer-ids one after another, or the last layer if none are named.
Layer i of SGLang is layer i + 1 of transformers.

Prompts are sent as token ids from the server's own tokenizer, so it is certain which tokens the states belong to.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadSetting, ModelError, UnsupportedSignal
from knowgate.models.openai.responses import translate_format_errors
from knowgate.models.openai.server import NEUTRAL_SAMPLING, ModelEndpoint
from knowgate.models.openai.spec import HiddenStateConfig
from knowgate.types import Vector

SETUP_HINT = "Start the server as docs/runtimes.md describes"
LAYERS_HINT = "After #layers= in the model name, list the layers of the server in the same order."
# Names and ids come from the server, so they are checked before they become part of a path.
RESPONSE_ID_PATTERN = re.compile(r"[\w-]{8,100}")
FILE_NAME_PATTERN = re.compile(r"[\w.-]{1,240}\.safetensors")
MAX_HEADER_BYTES = 1 << 20
FILE_TIMEOUT = 30.0  # seconds for the server to write a file
POLL_INTERVAL = 0.005  # seconds between two checks for a file
INTEGER_FORMATS = {"I64": "<i8", "I32": "<i4"}
FLOAT_FORMATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy has no BF16, so its bits are read


class HiddenStateReader:
    """Reads hidden states of prompts and drafts from one vLLM or SGLang server."""

    def __init__(self, endpoint: ModelEndpoint, config: HiddenStateConfig):
        self._endpoint = endpoint
        self._config = config

    def check(self, layers: Sequence[int]) -> None:
        """Check that the server can return the hidden states of these layers.

        Raises:
            UnsupportedSignal: The server was not started with one of the layers, or is not vLLM or SGLang.
            BadSetting: The server is vLLM, but the spec does not name its folder.
        """
        # The modulo converts negative layer numbers, which count from the end.
        missing = [layer for layer in layers if layer % self._config.depth not in self._config.layers]
        if missing:
            raise UnsupportedSignal(
                f"the server returns hidden states of the layers {self._layer_list}, but not of layer {missing[0]}. Start the "
                "server with that layer too. Then list all layers after its URL: #layers=..."
            )
        self._check_server()

    def _check_server(self) -> None:
        """Raise an error unless the server is SGLang, or vLLM with a named folder."""
        server = self._endpoint.server
        if server not in ("vllm", "sglang"):
            raise UnsupportedSignal(
                f"the server of openai:{self._endpoint.model} is '{server}', which cannot return hidden states. Use vLLM or "
                "SGLang, or a local model such as hf:NAME."
            )
        if server == "vllm" and self._config.storage is None:
            raise BadSetting(
                "the folder of vLLM's hidden states is unknown. Append #layers=...&storage=DIR to the server's URL. DIR is "
                "vLLM's shared_storage_path, as seen from this machine."
            )

    def read(self, ids: Sequence[int], layers: Sequence[int]) -> dict[int, Vector]:
        """Return the hidden states at the last token, by layer.

        Negative layer numbers count from the end.
        """
        states = self._read_sglang(ids) if self._endpoint.server == "sglang" else self._read_vllm(ids)
        if len(states) != len(self._config.layers):
            raise BadSetting(
                f"the server returned hidden states of {len(states)} layers, but #layers= lists {len(self._config.layers)} "
                f"({self._layer_list}). {LAYERS_HINT}"
            )
        return {layer: states[self._config.layers.index(layer % self._config.depth)] for layer in layers}

    def discard(self, response_id: str) -> None:
        """Delete the hidden states that vLLM wrote for a request.

        vLLM writes such files for every request.
        """
        if self._config.storage is not None:
            delete_states_files(self._config.storage, response_id)

    @property
    def _layer_list(self) -> str:
        return ", ".join(map(str, self._config.layers))

    def _read_vllm(self, ids: Sequence[int]) -> Vector:
        """Send token ids to vLLM, and read the hidden states from the file that it writes."""
        # vLLM writes a file of hidden states for every request. `complete_ids` deletes it, unless report=False.
        response = self._endpoint.complete_ids(ids, {**NEUTRAL_SAMPLING, "max_tokens": 1}, report=False)
        params = response.get("kv_transfer_params") if isinstance(response, dict) else None
        path = params.get("hidden_states_path") if isinstance(params, dict) else None
        if not isinstance(path, str) or self._config.storage is None:
            raise self._make_missing_error()
        return consume_states_file(self._config.storage, path, ids)

    def _read_sglang(self, ids: Sequence[int]) -> Vector:
        """Send token ids to SGLang and read the states in its response."""
        response = self._endpoint.generate_on_sglang(ids, {"return_hidden_states": "last"})
        n_layers = len(self._config.layers)
        with translate_format_errors("hidden states"):
            states = response["meta_info"].get("hidden_states")
            if states is None:
                raise self._make_missing_error()
            row = np.array(states[-1], dtype=np.float32)
            if row.ndim != 1 or not row.size or row.size % n_layers:
                raise BadSetting(
                    f"the server returned {row.size} hidden values per token, which cannot be divided among {n_layers} "
                    f"layers. {LAYERS_HINT}"
                )
        _check_finite(row)
        return row.reshape(n_layers, -1)

    def _make_missing_error(self) -> UnsupportedSignal:
        return UnsupportedSignal(f"openai:{self._endpoint.model} returned no hidden states. {SETUP_HINT}.")


def _check_finite(states: Vector) -> None:
    if not np.isfinite(states).all():
        raise ModelError("the server returned NaN or infinite hidden states. Check the server's weights and dtype.")


# --- files of vLLM --------------------------------------------------------------------------------


def consume_states_file(folder: Path, server_path: str, ids: Sequence[int], *, timeout: float = FILE_TIMEOUT) -> Vector:
    """Read the file of hidden states that vLLM wrote for a request, and delete it.

    Args:
        folder: Path of the shared folder on this machine.
        server_path: Path of the file on the server; only its file name is used.
        ids: The tokens that were sent.
        timeout: Maximum seconds to wait until the server has written the file.

    Returns:
        The hidden states at the last token (layers x width).
    """
    file = locate_states_file(folder, server_path)
    try:
        with _wait_and_delete(file, timeout), file.open("rb") as stream:
            return _read_last_states(stream, ids)
    except OSError as error:
        raise ModelError(
            f"cannot read the server's hidden states from '{file}': {error.strerror or error}. Check the permissions."
        ) from None


def delete_states_files(folder: Path, response_id: str) -> None:
    """Delete the files that vLLM wrote for a response. vLLM may still be writing them."""
    if not RESPONSE_ID_PATTERN.fullmatch(response_id):
        return
    for lock in folder.glob(f"*{response_id}-*.safetensors.lock"):
        # The errors mean that another process deleted the file, or that it will never be written.
        with contextlib.suppress(OSError, ModelError), _wait_and_delete(lock.with_suffix("")):
            pass


def locate_states_file(folder: Path, server_path: str) -> Path:
    """Return the file in `folder` with the same name as `server_path`."""
    # The server may run on Linux or Windows, so both / and \ separate folders.
    name = PureWindowsPath(PurePosixPath(server_path).name).name
    if not FILE_NAME_PATTERN.fullmatch(name):
        raise ModelError(f"the server sent an invalid file name for hidden states: '{name[:80]}'. Update the server.")
    return folder / name


@contextlib.contextmanager
def _wait_and_delete(file: Path, timeout: float = FILE_TIMEOUT) -> Iterator[None]:
    """Run a `with` block after the server has written a file. Then delete the file.

    Raises:
        ModelError: The file is not complete within `timeout` seconds.
    """
    lock = file.with_name(file.name + ".lock")
    deadline = time.monotonic() + timeout
    try:
        while not _is_written(file, lock):
            if time.monotonic() > deadline:
                raise ModelError(
                    f"the server's file '{file.name}' of hidden states is missing or incomplete in '{file.parent}'. Append "
                    "#layers=...&storage=DIR to the server's URL. DIR is the server's shared_storage_path, as seen from "
                    "this machine."
                )
            time.sleep(POLL_INTERVAL)
        yield
    finally:
        for path in (file, lock):
            with contextlib.suppress(OSError):  # this machine may not be allowed to write to the folder
                path.unlink(missing_ok=True)


def _is_written(file: Path, lock: Path) -> bool:
    """Return whether the server has finished writing a file.

    The server locks the file `lock` while it writes.
    """
    if not lock.exists():
        return file.exists()
    try:
        import fcntl
    except ImportError:
        raise UnsupportedSignal(
            "hidden states of a vLLM server cannot be read on Windows. Use WSL or SGLang."
        ) from None
    with lock.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _read_last_states(stream: BinaryIO, ids: Sequence[int]) -> Vector:
    """Read the hidden states of the last token from a safetensors file.

    The file must contain exactly the tokens `ids`.
    """
    try:
        header = _read_header(stream)
        start = stream.tell()
        token_ids = _read_tensor(stream, start, header["token_ids"], INTEGER_FORMATS).tolist()
        values = _read_tensor(stream, start, header["hidden_states"], FLOAT_FORMATS, last_row=True)
        n_tokens, n_layers, width = header["hidden_states"]["shape"]
        states: Vector = values.reshape(n_layers, width).astype(np.float32)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ModelError("the file of hidden states is damaged or has an unknown format. Update the server.") from None
    if token_ids != list(ids) or n_tokens != len(ids):
        raise ModelError(
            "the file that the server wrote has hidden states of another prompt, so another server probably writes to "
            "the same folder. Give each server its own folder."
        )
    _check_finite(states)
    return states


def _read_header(stream: BinaryIO) -> Any:
    """Read the JSON header of a safetensors file, whose size comes first."""
    size = int.from_bytes(stream.read(8), "little")
    if not 0 < size <= MAX_HEADER_BYTES:
        raise ValueError("no header")
    return json.loads(stream.read(size))


def _read_tensor(
    stream: BinaryIO, start: int, entry: Any, formats: dict[str, str], *, last_row: bool = False
) -> NDArray[Any]:
    """Read a tensor of a safetensors file as a flat array.

    Args:
        stream: The safetensors file.
        start: Offset of the data in the file.
        entry: The tensor's entry in the header of the file.
        formats: Allowed number formats -> numpy dtypes.
        last_row: Read only the last entry of the first axis, such as the states of the last token.
    """
    dtype = np.dtype(formats[entry["dtype"]])
    shape = [int(size) for size in entry["shape"]]
    begin, end = entry["data_offsets"]
    if math.prod(shape) * dtype.itemsize != end - begin or begin < 0:
        raise ValueError("sizes differ")
    count = math.prod(shape[1:] if last_row else shape)
    n_bytes = count * dtype.itemsize
    stream.seek(start + end - n_bytes)  # the last row ends where the tensor ends
    values = np.frombuffer(stream.read(n_bytes), dtype)
    if len(values) != count:
        raise ValueError("truncated")
    if entry["dtype"] == "BF16":  # a BF16 number is the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values
