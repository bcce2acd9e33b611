"""Loading a transformers model: device, number format, fingerprint, and errors a user can act on."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from knowgate.core.validation import read_json
from knowgate.errors import BadSetting, MissingExtra, OutOfMemory, WeightsError
from knowgate.models import embedded_weights as weights
from knowgate.models.hf.batching import is_memory_error, translate_device_errors

SUPPORTED_BITS = (4, 8)


def check_bits(bits: int) -> None:
    """Refuse what cannot be had here; 0 is the usual number format."""
    if not bits:
        return
    if bits not in SUPPORTED_BITS:
        raise BadSetting(f"weights can have 4 or 8 bits, not {bits}; 0 is the usual number format.")
    if not torch.cuda.is_available():
        raise BadSetting(f"weights in {bits} bits need a GPU with CUDA, and there is none here. Leave --bits away.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtra(f"a base in {bits} bits", "quantised")


def build_quantization_options(bits: int) -> dict[str, Any]:
    """What transformers is told; a quantised model is put onto the GPU while it is read."""
    if not bits:
        return {}
    from transformers import BitsAndBytesConfig

    # NF4 with doubly quantised scales, as QLoRA has it (Dettmers et al. 2023, section 3)
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    config = BitsAndBytesConfig(load_in_4bit=True, **four) if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    return {"quantization_config": config, "device_map": {"": 0}}


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
DTYPE_VARIABLE = "KNOWGATE_DTYPE"  # variable of the environment
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HASHED_BYTES = 1 << 20  # bytes hashed at each end of a weight file: identity without reading 16 GB


@dataclass(frozen=True)
class LoadedModel:
    model: Any
    tokenizer: Any
    device: torch.device


def load_transformers(name_or_dir: str, bits: int = 0) -> LoadedModel:
    """bits: 4 or 8, to hold the weights in as many (CUDA)."""
    check_bits(bits)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = choose_dtype(device)
    local = _is_local(name_or_dir)
    if device.type == "cuda":
        # cuDNN's attention makes a plan for every new length, a millisecond on the host: decoding has one at each step
        torch.backends.cuda.enable_cudnn_sdp(False)
    with silence_transformers(), translate_loading_errors(name_or_dir):
        tokenizer = AutoTokenizer.from_pretrained(name_or_dir, local_files_only=local)
        model = AutoModelForCausalLM.from_pretrained(
            name_or_dir, dtype=dtype, local_files_only=local, **build_quantization_options(bits)
        )
    return LoadedModel(model.eval() if bits else _moved(model, device, name_or_dir), tokenizer, device)


def load_transformers_config(name_or_dir: str) -> Any:
    """What is said about the model beside its weights."""
    local = _is_local(name_or_dir)
    with silence_transformers(), translate_loading_errors(name_or_dir):
        return AutoConfig.from_pretrained(name_or_dir, local_files_only=local)


def choose_dtype(device: torch.device) -> torch.dtype:
    """What KNOWGATE_DTYPE names; else bf16 on CUDA and fp32 on a CPU, where half precision is far too slow."""
    chosen = os.environ.get(DTYPE_VARIABLE, "")
    if not chosen:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if chosen not in DTYPES:
        raise BadSetting(
            f"{DTYPE_VARIABLE}={chosen} names no number format. Expected: {', '.join(DTYPES)}, or unset it."
        )
    return DTYPES[chosen]


def _moved(model: Any, device: torch.device, name: str) -> Any:
    try:
        with translate_device_errors():
            return model.to(device).eval()
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        raise OutOfMemory(
            f"the GPU has no room for the model '{name}': end other programs that use it, use a smaller model, or run "
            "on the CPU with CUDA_VISIBLE_DEVICES= before the command."
        ) from error


@contextlib.contextmanager
def translate_loading_errors(name: str) -> Iterator[None]:
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
    return not weights.is_hub_reachable()


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
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


def compute_fingerprint(name_or_dir: str, commit: str | None = None) -> str:
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
        head = file.read(HASHED_BYTES)
        file.seek(max(0, path.stat().st_size - HASHED_BYTES))
        return head + file.read(HASHED_BYTES)


@dataclass
class LoraAdapters:
    """The adapters put into a model, and the turn to use it: whoever runs it holds `turn`, so that nobody meets an
    adapter that somebody else switched on. The lock is one thread's as often as that thread likes."""

    model: Any
    turn: threading.RLock = field(default_factory=threading.RLock, repr=False)
    wrapped: Any = field(default=None, repr=False)

    def add(self, name: str, folder: Path) -> None:
        """Put the adapter in a folder into the model, off. One that is in is not read again."""
        with self.turn:
            if self.wrapped is not None and name in self.wrapped.peft_config:
                return
            try:
                from peft import PeftModel
            except ModuleNotFoundError:
                raise MissingExtra("a LoRA judge", "train") from None
            with translate_loading_errors(str(folder)):
                if self.wrapped is None:
                    self.wrapped = PeftModel.from_pretrained(self.model, str(folder), adapter_name=name)
                else:
                    self.wrapped.load_adapter(str(folder), adapter_name=name)
            self.wrapped.eval()
            self._switch_off()

    @contextlib.contextmanager
    def activate(self, name: str) -> Iterator[None]:
        """The model with this adapter, for this thread alone; without any again at the end, whatever happens."""
        with self.turn:
            for layer in self._layers():
                layer.enable_adapters(True)
                layer.set_adapter(name, inference_mode=True)
            try:
                yield
            finally:
                self._switch_off()

    def _switch_off(self) -> None:
        for layer in self._layers():
            layer.enable_adapters(False)

    def _layers(self) -> list[Any]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        return [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]
