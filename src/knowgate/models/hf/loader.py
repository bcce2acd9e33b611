"""Load transformers models and LoRA adapters, and compute the fingerprint of weights."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

from knowgate.core.stop_flag import check_stop_flag
from knowgate.core.validation import read_json
from knowgate.errors import BadSetting, KnowgateError, MissingExtra, OutOfMemory, WeightsError, get_cause, require_extra
from knowgate.models.embedded_weights import is_hub_reachable
from knowgate.models.hf.batching import is_memory_error, translate_device_errors

SOURCE_FILE = "knowgate-source.json"  # lies beside converted weights and names the file they were made from
DTYPE_VARIABLE = "KNOWGATE_DTYPE"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HASHED_BYTES = 1 << 20  # hashed at each end of a weight file, to identify 16 GB without reading them
SUPPORTED_BITS = (4, 8)


@dataclass(frozen=True)
class LoadedModel:
    """A transformers model in memory.

    Args:
        model: The transformers model.
        tokenizer: Its transformers tokenizer.
        device: The device that the model runs on.
    """

    model: Any
    tokenizer: Any
    device: torch.device


def load_transformers(name_or_dir: str, bits: int = 0) -> LoadedModel:
    """Load a causal LLM and its tokenizer from a hub name or a folder.

    Args:
        name_or_dir: Hub name or folder.
        bits: Quantize the weights to 4 or 8 bits (CUDA only); 0 for no quantization.

    Raises:
        WeightsError: The files are missing or damaged.
        OutOfMemory: The weights do not fit the GPU.
    """
    check_bits(bits)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = choose_dtype(device)
    local_only = _is_local_only(name_or_dir)
    with silence_transformers(), translate_loading_errors(name_or_dir):
        tokenizer = AutoTokenizer.from_pretrained(name_or_dir, local_files_only=local_only)
        model = AutoModelForCausalLM.from_pretrained(
            name_or_dir, dtype=dtype, local_files_only=local_only, **build_quantization_options(bits)
        )
    _add_stop_checks(model)
    if not bits:  # a quantized model is already on the GPU
        model = _move_to_device(model, device, name_or_dir)
    if device.type == "cuda":
        # cuDNN attention plans every new sequence length on the host, which costs a millisecond per decoding step.
        torch.backends.cuda.enable_cudnn_sdp(False)
        fuse_norms(model)
    return LoadedModel(model.eval(), tokenizer, device)


def _add_stop_checks(model: Any) -> None:
    """Let each decoder layer of a model first check whether the request was canceled."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):  # the class of decoder layers in transformers
            module.register_forward_pre_hook(_stop_before_layer, with_kwargs=True)


def fuse_norms(model: Any) -> None:
    """Compute each RMS norm of a model by one GPU kernel.

    The code of transformers takes eight kernels. Labeling with passages is a tenth faster with one.
    """
    for module in model.modules():
        # Norms of other formulas, such as those of Gemma, have no `variance_epsilon`.
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = functools.partial(_normalize, module)


def _normalize(norm: Any, states: torch.Tensor) -> torch.Tensor:
    """Return what an RMS norm of transformers returns, up to rounding."""
    return torch.nn.functional.rms_norm(states, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _stop_before_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise StopError before the next layer of a canceled request.

    Only passes over several tokens are checked.
    """
    states = args[0] if args else kwargs["hidden_states"]
    if states.shape[1] > 1:  # number of tokens
        check_stop_flag()


def load_transformers_config(name_or_dir: str) -> Any:
    """Load the configuration of a model without its weights."""
    local_only = _is_local_only(name_or_dir)
    with silence_transformers(), translate_loading_errors(name_or_dir):
        return AutoConfig.from_pretrained(name_or_dir, local_files_only=local_only)


def choose_dtype(device: torch.device) -> torch.dtype:
    """Return the number format of the weights.

    The default is bf16 on CUDA and fp32 on a CPU.
    """
    name = os.environ.get(DTYPE_VARIABLE, "")
    if not name:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise BadSetting(f"{DTYPE_VARIABLE}={name} is not a known number format. Use one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _move_to_device(model: Any, device: torch.device, name: str) -> Any:
    """Move a model to its device; raises OutOfMemory if it does not fit."""
    try:
        with translate_device_errors():
            return model.to(device)
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        raise OutOfMemory(
            f"the model '{name}' does not fit into the GPU's memory. Use a smaller model, or stop other programs that use the "
            "GPU. To use the CPU, set CUDA_VISIBLE_DEVICES= (empty)."
        ) from error


@contextlib.contextmanager
def translate_loading_errors(name: str) -> Iterator[None]:
    """Raise WeightsError with advice if loading the model `name` fails in the block."""
    try:
        yield
    except KnowgateError:
        raise
    except Exception as error:  # a damaged file may raise anything in transformers and its file readers
        reason = get_cause(error)
        kind = "path" if Path(name).exists() else "hub name"
        raise WeightsError(f"cannot load the model from the {kind} '{name}': {reason}. {_advise(name)}") from error


def _advise(name: str) -> str:
    """Return advice for the user about a model that cannot be loaded."""
    if (Path(name) / SOURCE_FILE).is_file():  # the folder was converted from a GGUF file
        return "Delete this folder. The model is then converted again at the next start."
    if Path(name).is_file():
        return "The file is damaged, or transformers cannot read its format. Download it again."
    return "Expected: a folder with config.json, tokenizer files and safetensors weights, or a hub name."


def _is_local_only(name: str) -> bool:
    """Return whether to load a model from local files, without the hub."""
    if Path(name).is_dir():
        return True
    if name.startswith(("/", ".", "~")):
        raise WeightsError(f"the model folder '{name}' does not exist. Give a folder or a Hugging Face name.")
    return not is_hub_reachable()


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppress the progress bars and warnings that transformers prints while it loads a model."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        transformers.utils.logging.enable_progress_bar()


def compute_fingerprint(name_or_dir: str, load_config: Callable[[], Any]) -> str:
    """Return a hash that identifies the weights of a model.

    Args:
        name_or_dir: Hub name or folder. For a hub name, the hash depends on the name and the commit only. For a folder,
            it depends on the GGUF file that the folder was converted from, or else on the files in the folder.
        load_config: Loads the configuration of the model, which tells its commit on the hub.
    """
    folder = Path(name_or_dir)
    if not folder.is_dir():
        commit = getattr(load_config(), "_commit_hash", None)
        return hashlib.sha256(f"hub:{name_or_dir}@{commit}".encode()).hexdigest()[:16]
    source = folder / SOURCE_FILE  # it is there if the folder was converted from a GGUF file
    return str(read_json(source)["sha256"])[:16] if source.is_file() else _hash_files(folder)


def _hash_files(folder: Path) -> str:
    """Return a hash of the names, sizes, first and last megabytes of a model's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name in ("config.json", "tokenizer.json") or path.suffix == ".safetensors":
            digest.update(path.name.encode() + path.stat().st_size.to_bytes(8, "big"))
            digest.update(_read_ends(path))
    return digest.hexdigest()[:16]


def _read_ends(path: Path) -> bytes:
    """Read the first and the last megabyte of a file."""
    with path.open("rb") as file:
        head = file.read(HASHED_BYTES)
        file.seek(max(0, path.stat().st_size - HASHED_BYTES))
        return head + file.read(HASHED_BYTES)


def check_bits(bits: int) -> None:
    """Raise an error if this machine cannot quantize weights to `bits` bits. 0 means no quantization."""
    if not bits:
        return
    if bits not in SUPPORTED_BITS:
        raise BadSetting(f"bits={bits} is not supported. Use 4 or 8, or 0 for no quantization.")
    if not torch.cuda.is_available():
        raise BadSetting(f"bits={bits} needs a GPU with CUDA, but this machine has none. Use bits=0.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtra(f"bits={bits}", "quantised")


def build_quantization_options(bits: int) -> dict[str, Any]:
    """Return the transformers arguments for loading a model with 4 or 8 bits."""
    if not bits:
        return {}
    from transformers import BitsAndBytesConfig

    # The settings for 4 bits are NF4 with doubly quantized scales, as in QLoRA (Dettmers et al. 2023, section 3).
    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    first_gpu = 0
    return {"quantization_config": config, "device_map": {"": first_gpu}}  # "" stands for the whole model


@dataclass
class LoraAdapters:
    """LoRA adapters (small additions to the weights) of a model.

    At most one adapter is active at a time. Hold `lock` while the model runs, so that no other thread switches the
    adapter.

    Args:
        model: The transformers model.
        lock: A re-entrant lock.
        peft_model: The model with all loaded adapters; None until the first adapter is loaded.
    """

    model: Any
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    peft_model: Any = field(default=None, repr=False)

    def add(self, name: str, folder: Path) -> None:
        """Load an adapter from a folder without activating it. Does nothing if it is already loaded."""
        with self.lock:
            if self.peft_model is not None and name in self.peft_model.peft_config:
                return
            with require_extra("a LoRA judge", "train"):
                from peft import PeftModel
            with translate_loading_errors(str(folder)):
                if self.peft_model is None:
                    self.peft_model = PeftModel.from_pretrained(self.model, str(folder), adapter_name=name)
                else:
                    self.peft_model.load_adapter(str(folder), adapter_name=name)
            self.peft_model.eval()
            self._deactivate()

    @contextlib.contextmanager
    def activate(self, name: str) -> Iterator[None]:
        """Run a `with` block in which one adapter is active and the model's lock is held."""
        with self.lock:
            for layer in self._lora_layers():
                layer.enable_adapters(True)
                layer.set_adapter(name, inference_mode=True)
            try:
                yield
            finally:
                self._deactivate()

    def _deactivate(self) -> None:
        for layer in self._lora_layers():
            layer.enable_adapters(False)

    def _lora_layers(self) -> list[Any]:
        """Return the layers of the model that have an adapter."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        return [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]
