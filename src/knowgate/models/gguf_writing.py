"""A loaded model written as a GGUF file, for llama.cpp and what is built on it.

Llama and Qwen2 alone: what their tensors are called comes from `gguf`, and the rows of Llama's queries and keys are put
into the order that llama.cpp turns them in. Knows nothing of judges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from knowgate.errors import BadSetting, MissingExtra
from knowgate.models.gguf_tokens import copy_tokens, write_tokens

GgufKind = Literal["q8_0", "f16"]
ARCHITECTURES = ("llama", "qwen2")
BLOCK = 32  # values that share a scale in q8_0


def check_writable(config: Any) -> None:
    """Refuse what would be written wrongly."""
    if config.model_type not in ARCHITECTURES:
        raise BadSetting(
            f"a base of the kind '{config.model_type}' cannot be written as GGUF here; these can: "
            f"{', '.join(ARCHITECTURES)}. Use the gate as it is, or fit one on such a base."
        )
    if (rope := config.rope_parameters.get("rope_type", "default")) != "default":
        raise BadSetting(
            f"the base stretches its positions ('{rope}'), which is not written as GGUF here. Use the gate as it is, "
            "or fit one on another base."
        )


def write_gguf(
    file: Path,
    model: Any,
    tokenizer: Any,
    *,
    kind: GgufKind,
    tokens_of: Path | None,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write a transformers model. tokens_of: a GGUF file whose tokenizer is copied; None: it is written anew.

    watch: told of tensors done, of how many.
    """
    try:
        import gguf
    except ModuleNotFoundError:
        raise MissingExtra("writing a GGUF file", "local") from None
    check_writable(model.config)
    writer = gguf.GGUFWriter(file, model.config.model_type)
    writer.add_type("model")
    writer.add_name(file.stem)
    _shape(writer, model.config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind == "q8_0" else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if tokens_of is None:
        write_tokens(writer, tokenizer, model.config.vocab_size)
    else:
        copy_tokens(writer, tokens_of)
    total = len(model.state_dict())
    for done, (each, values, form) in enumerate(_tensors(model, kind)):
        writer.add_tensor(each, values, raw_dtype=form)
        watch(done + 1, total)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shape(writer: Any, config: Any) -> None:
    heads, width = config.num_attention_heads, config.hidden_size
    own = getattr(config, "head_dim", None) or width // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(width)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(own)
    writer.add_vocab_size(config.vocab_size)
    if own * heads != width:
        writer.add_key_length(own)
        writer.add_value_length(own)


def _tensors(model: Any, kind: GgufKind) -> Iterator[tuple[str, Any, Any]]:
    import gguf

    config = model.config
    names = gguf.get_tensor_name_map(_architecture(config), config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise BadSetting(f"the base has weights that GGUF has no name for: {key}. Use the gate as it is.")
        values = _turned(key, tensor.detach().float().cpu().numpy(), config)
        form = _form(values, kind)
        yield name, gguf.quantize(values, form), form


def _architecture(config: Any) -> Any:
    import gguf

    return next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)


def _form(values: Any, kind: GgufKind) -> Any:
    """Norms and biases stay as they are; rows that make no whole blocks are halved only."""
    import gguf

    if values.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    eighth = kind == "q8_0" and values.shape[-1] % BLOCK == 0
    return gguf.GGMLQuantizationType.Q8_0 if eighth else gguf.GGMLQuantizationType.F16


def _turned(key: str, values: Any, config: Any) -> Any:
    """Llama's positions turn the first half of a head against the second; llama.cpp turns neighbours."""
    part = key.split(".")[-2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if config.model_type != "llama" or part not in heads:
        return values
    n = heads[part]
    halves = values.reshape(n, 2, values.shape[0] // n // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
