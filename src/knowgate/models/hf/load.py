"""Loading a transformers model: device, number format, fingerprint, and errors a user can act on."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from knowgate import weights
from knowgate.doors import read_json
from knowgate.errors import BadSetting, OutOfMemory, WeightsError
from knowgate.models.hf.memory import is_pressure, told
from knowgate.models.hf.quantised import check_bits, loading_options

SOURCE_FILE = "knowgate-source.json"  # written beside converted weights: what they were made from
# what transformers and its readers raise for a damaged file
LOADING_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    RuntimeError,
    TypeError,
    AttributeError,
    OverflowError,
    MemoryError,
    struct.error,
    SafetensorError,
)
FORMAT = "KNOWGATE_DTYPE"  # variable of the environment
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAMPLED = 1 << 20  # bytes hashed at each end of a weight file: identity without reading 16 GB


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: Any
    device: torch.device


def load(name_or_dir: str, bits: int = 0) -> Loaded:
    """bits: 4 or 8, to hold the weights in as many (CUDA)."""
    check_bits(bits)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = number_format(device)
    local = _is_local(name_or_dir)
    if device.type == "cuda":
        # cuDNN's attention makes a plan for every new length, a millisecond on the host: decoding has one at each step
        torch.backends.cuda.enable_cudnn_sdp(False)
    with quiet(), explained(name_or_dir):
        tokenizer = AutoTokenizer.from_pretrained(name_or_dir, local_files_only=local)
        model = AutoModelForCausalLM.from_pretrained(
            name_or_dir, dtype=dtype, local_files_only=local, **loading_options(bits)
        )
    return Loaded(model.eval() if bits else _moved(model, device, name_or_dir), tokenizer, device)


def load_config(name_or_dir: str) -> Any:
    """What is said about the model beside its weights."""
    local = _is_local(name_or_dir)
    with quiet(), explained(name_or_dir):
        return AutoConfig.from_pretrained(name_or_dir, local_files_only=local)


def number_format(device: torch.device) -> torch.dtype:
    """What KNOWGATE_DTYPE names; else bf16 on CUDA and fp32 on a CPU, where half precision is far too slow."""
    chosen = os.environ.get(FORMAT, "")
    if not chosen:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if chosen not in FORMATS:
        raise BadSetting(f"{FORMAT}={chosen} names no number format. Expected: {', '.join(FORMATS)}, or unset it.")
    return FORMATS[chosen]


def _moved(model: Any, device: torch.device, name: str) -> Any:
    try:
        with told():
            return model.to(device).eval()
    except RuntimeError as error:
        if not is_pressure(error):
            raise
        raise OutOfMemory(
            f"the GPU has no room for the model '{name}': end other programs that use it, use a smaller model, or run "
            "on the CPU with CUDA_VISIBLE_DEVICES= before the command."
        ) from error


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    try:
        yield
    except LOADING_ERRORS as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        kind = "path" if Path(name).exists() else "hub name"
        raise WeightsError(f"cannot load the model from the {kind} '{name}': {first}. {_advice(name)}") from error


def _advice(name: str) -> str:
    if (Path(name) / SOURCE_FILE).is_file():
        return "Delete this folder: it is converted again at the next start."
    if Path(name).is_file():
        return "The file is damaged or of a kind that transformers cannot read: fetch it again."
    return "Expected: a folder with config.json, tokenizer files and safetensors weights, or a hub name."


def _is_local(name: str) -> bool:
    """Whether to look into the local cache only; a path that is not there is said to be so, not sought on the hub."""
    if Path(name).is_dir():
        return True
    if name.startswith(("/", ".", "~")):
        raise WeightsError(f"there is no folder '{name}'. Expected: a folder with a model, or a hub name.")
    return not weights.hub_answers()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers prints progress bars and advice while loading; our own messages say what matters."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        transformers.utils.logging.enable_progress_bar()


def fingerprint(name_or_dir: str, commit: str | None = None) -> str:
    """Identity of the weights: of the GGUF file they were converted from, of a folder's files, or of a hub commit."""
    folder = Path(name_or_dir)
    if not folder.is_dir():
        return hashlib.sha256(f"hub:{name_or_dir}@{commit}".encode()).hexdigest()[:16]
    source = folder / SOURCE_FILE
    if source.is_file():
        return str(read_json(source)["sha256"])[:16]
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name in ("config.json", "tokenizer.json") or path.suffix == ".safetensors":
            digest.update(path.name.encode() + path.stat().st_size.to_bytes(8, "big"))
            digest.update(_ends(path))
    return digest.hexdigest()[:16]


def _ends(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(SAMPLED)
        file.seek(max(0, path.stat().st_size - SAMPLED))
        return head + file.read(SAMPLED)
