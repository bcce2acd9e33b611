"""Loading a transformers model: device, number format, fingerprint, and errors a user can act on."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from knowgate.errors import WeightsError
from knowgate.files import read_json

SOURCE_FILE = "knowgate-source.json"  # written beside converted weights: what they were made from
SAMPLED = 1 << 20  # bytes hashed at each end of a weight file: identity without reading 16 GB


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: Any
    device: torch.device


def load(name_or_dir: str) -> Loaded:
    """bf16 on CUDA; fp32 on CPU, where half precision is a hundred times slower (our measurement)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with quiet(), explained(name_or_dir):
        tokenizer = AutoTokenizer.from_pretrained(name_or_dir)
        model = AutoModelForCausalLM.from_pretrained(name_or_dir, dtype=dtype)
    return Loaded(model.to(device).eval(), tokenizer, device)


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        kind = "folder" if Path(name).exists() else "hub name"
        raise WeightsError(
            f"cannot load the model from the {kind} '{name}': {first} "
            "Expected: a folder with config.json, tokenizer files and safetensors weights, or a hub name."
        ) from error


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
