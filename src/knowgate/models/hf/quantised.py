"""Weights in 4 or 8 bits, by bitsandbytes: a base of a third or half the memory, on CUDA alone."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from knowgate.errors import BadSetting, MissingExtra

BITS = (4, 8)


def check_bits(bits: int) -> None:
    """Refuse what cannot be had here; 0 is the usual number format."""
    if not bits:
        return
    if bits not in BITS:
        raise BadSetting(f"weights can have 4 or 8 bits, not {bits}; 0 is the usual number format.")
    if not torch.cuda.is_available():
        raise BadSetting(f"weights in {bits} bits need a GPU with CUDA, and there is none here. Leave --bits away.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtra(f"a base in {bits} bits", "quantised")


def loading_options(bits: int) -> dict[str, Any]:
    """What transformers is told; a quantised model is put onto the GPU while it is read."""
    if not bits:
        return {}
    from transformers import BitsAndBytesConfig

    # NF4 with doubly quantised scales, as QLoRA has it (Dettmers et al. 2023, section 3)
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    config = BitsAndBytesConfig(load_in_4bit=True, **four) if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    return {"quantization_config": config, "device_map": {"": 0}}
