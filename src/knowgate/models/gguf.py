"""GGUF files through transformers: converted once to safetensors in the cache, so only the first start pays.

De-quantising 135M parameters takes some twenty seconds; loading the converted folder takes three.
"""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from knowgate import weights
from knowgate.doors import user_path
from knowgate.errors import MissingExtra, WeightsError
from knowgate.files import cache_dir, locked, new_folder, remembered_sha256, write_json
from knowgate.models.hf.load import SOURCE_FILE, explained, quiet
from knowgate.models.hf.model import HFModel
from knowgate.registry import split_spec

LOGGER = logging.getLogger("knowgate")
FORMAT = 1  # raise when the layout of converted folders changes


def open_gguf(file: str, label: str = "") -> HFModel:
    """The model in a GGUF file (`gguf:FILE`)."""
    return HFModel(str(converted(user_path(file))), label or f"gguf:{file}")


def converted(file: Path) -> Path:
    """The folder with this file's weights as safetensors; made on first use."""
    if not file.is_file():
        raise WeightsError(f"there is no GGUF file '{file}'. Check the path; all kinds of models: knowgate models")
    sha256 = remembered_sha256(file)
    target = cache_dir() / "converted" / f"{file.stem}-{sha256[:12]}-v{FORMAT}"
    if not (target / SOURCE_FILE).is_file():
        with locked(target.with_suffix(".lock")):
            if not (target / SOURCE_FILE).is_file():
                _convert(file, sha256, target)
    return target


def gguf_behind(spec: str) -> Path | None:
    """The GGUF file that a model spec's weights come from; None where they come from elsewhere."""
    name, value = split_spec(spec)
    if name == "smollm":
        return weights.whole_file("smollm")
    return user_path(value) if name == "gguf" else None


def _convert(file: Path, sha256: str, target: Path) -> None:
    try:
        import gguf  # noqa: F401 - transformers needs it and says so only in passing
    except ModuleNotFoundError:
        raise MissingExtra("a GGUF file", "local") from None
    LOGGER.info("converting %s once to safetensors ...", file.name)
    model, tokenizer = _dequantise(file)
    with new_folder(target) as partial:
        tokenizer.save_pretrained(partial)
        # save_pretrained refuses a GGUF-loaded model; the weights are plain tensors by now.
        del model.config.quantization_config
        model.config.save_pretrained(partial)
        model.generation_config.save_pretrained(partial)
        save_file(_tensors(model), partial / "model.safetensors", metadata={"format": "pt"})
        write_json(partial / SOURCE_FILE, {"sha256": sha256, "file": file.name, "format": FORMAT})


def _dequantise(file: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers' own bar for the conversion cannot be switched off, so it is caught
    with quiet(), explained(str(file)), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
        )
    return model, tokenizer


def _tensors(model: Any) -> dict[str, Any]:
    """The state dict; tied output weights are left out, as loading ties them again."""
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    state = model.state_dict()
    return {key: value.contiguous() for key, value in state.items() if not (tied and key == "lm_head.weight")}
