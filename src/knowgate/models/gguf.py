"""Read and write GGUF files: load them with transformers (`gguf:FILE`, `smollm`), and export transformers models.

A GGUF file is converted to safetensors on first use, and the result is cached. Dequantizing 135M parameters takes about
twenty seconds, and loading the converted folder takes three.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.torch import save_file

from knowgate.core.files import atomic_folder, cache_dir, cached_sha256_file, file_lock, write_json
from knowgate.core.registry import split_spec
from knowgate.core.validation import expand_path
from knowgate.errors import BadSetting, WeightsError, require_extra
from knowgate.models.embedded_weights import fetch_verified_file
from knowgate.models.hf.loader import SOURCE_FILE, silence_transformers, translate_loading_errors
from knowgate.models.hf.model import HFModel

LOGGER = logging.getLogger("knowgate")
CONVERSION_VERSION = 1  # increase it when the layout of converted folders changes
EXPORTABLE_ARCHITECTURES = ("llama", "qwen2")
GgufFormat = Literal["q8_0", "f16"]
Q8_BLOCK_SIZE = 32  # values that share a scale in q8_0
TOKEN_NORMAL, TOKEN_CONTROL, TOKEN_USER_DEFINED, TOKEN_UNUSED = 1, 3, 4, 5  # llama.cpp's token types
WORD_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Regular expression that splits text into words -> llama.cpp's name for it.
PRE_TOKENIZERS = {WORD_SPLIT_PATTERN % "": "qwen2", WORD_SPLIT_PATTERN % "{1,3}": "llama-bpe"}


# --- reading --------------------------------------------------------------------------------------


def open_gguf(file: str, label: str = "") -> HFModel:
    """Return the model for the spec `gguf:FILE`, converting the file on first use.

    Args:
        file: Path of the GGUF file.
        label: Name of the model; `gguf:FILE` by default.
    """
    return HFModel(str(convert_gguf(expand_path(file))), label or f"gguf:{file}")


def open_smollm() -> HFModel:
    """Return the embedded LLM, SmolLM2-135M-Instruct; it is downloaded and converted on first use."""
    return open_gguf(str(fetch_verified_file("smollm")), label="smollm")


def find_gguf_file(spec: str) -> Path | None:
    """Return the GGUF file of a model spec, or None for other kinds of models."""
    name, value = split_spec(spec)
    if name == "smollm":
        return fetch_verified_file("smollm")
    return expand_path(value) if name == "gguf" else None


def convert_gguf(file: Path) -> Path:
    """Convert a GGUF file for transformers, and return the safetensors folder.

    The folder is cached for later calls.
    """
    if not file.is_file():
        raise WeightsError(f"the GGUF file '{file}' does not exist. Check the path, or see: knowgate models")
    sha256 = cached_sha256_file(file)
    target = cache_dir() / "converted" / f"{file.stem}-{sha256[:12]}-v{CONVERSION_VERSION}"
    if not (target / SOURCE_FILE).is_file():
        with file_lock(target.with_suffix(".lock")):
            if not (target / SOURCE_FILE).is_file():
                _convert(file, sha256, target)
    return target


def _convert(file: Path, sha256: str, target: Path) -> None:
    """Convert a GGUF file to a folder that transformers can load."""
    with require_extra("a GGUF file", "local"):
        import gguf  # noqa: F401 - transformers needs it, but its error does not say so clearly
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    LOGGER.info("converting %s to safetensors (only once) ...", file.name)
    # The progress bar of the conversion cannot be switched off, so stderr is captured.
    with silence_transformers(), translate_loading_errors(str(file)), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    with atomic_folder(target) as folder:
        tokenizer.save_pretrained(folder)
        _save_model(model, folder)
        write_json(folder / SOURCE_FILE, {"sha256": sha256, "file": file.name, "format": CONVERSION_VERSION})


def _save_model(model: Any, folder: Path) -> None:
    """Save the configuration and the weights of a model that was loaded from GGUF.

    `model.save_pretrained` would refuse it, although its weights are plain tensors by now.
    """
    if hasattr(model.config, "quantization_config"):  # older versions of transformers do not set it
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if getattr(model.config, "tie_word_embeddings", False):
        # Tied output weights are a copy of the input embeddings. Loading ties them again.
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- writing --------------------------------------------------------------------------------------


def check_exportable(config: Any) -> None:
    """Raise BadSetting for a model that cannot be exported to GGUF.

    Args:
        config: The transformers configuration of the model.
    """
    if config.model_type not in EXPORTABLE_ARCHITECTURES:
        raise BadSetting(
            f"a base model of the architecture '{config.model_type}' cannot be exported to GGUF. Supported "
            f"architectures: {', '.join(EXPORTABLE_ARCHITECTURES)}. Use the gate without exporting it."
        )
    if (rope_type := config.rope_parameters.get("rope_type", "default")) != "default":
        raise BadSetting(
            f"the base model's position embeddings ('{rope_type}') cannot be exported to GGUF. Use the gate without an export."
        )


def write_gguf(
    file: Path,
    model: Any,
    tokenizer: Any,
    *,
    number_format: GgufFormat,
    tokenizer_source: Path | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write a transformers model as a GGUF file.

    Args:
        file: The file to write.
        model: A Llama or Qwen2 model.
        tokenizer: The fast tokenizer of the model.
        number_format: Number format of the weight matrices: q8_0 (8 bits) or f16.
        tokenizer_source: A GGUF file to copy the tokenizer from; None to write `tokenizer`.
        on_progress: Called after each tensor with the number of finished tensors and the number of all tensors.

    Raises:
        BadSetting: The model or its tokenizer cannot be written.
    """
    with require_extra("writing a GGUF file", "local"):
        import gguf
    check_exportable(model.config)
    writer = gguf.GGUFWriter(file, model.config.model_type)
    _add_description(writer, file.stem, model.config, number_format)
    if tokenizer_source is None:
        write_tokenizer(writer, tokenizer, model.config.vocab_size)
    else:
        copy_tokenizer(writer, tokenizer_source)
    _add_tensors(writer, model, number_format, on_progress)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_description(writer: Any, name: str, config: Any, number_format: GgufFormat) -> None:
    """Add the name, the number format and the dimensions of the model to the header of the GGUF file."""
    import gguf

    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{number_format.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    heads = config.num_attention_heads
    width = config.hidden_size
    head_width = getattr(config, "head_dim", None) or width // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(width)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_width)
    writer.add_vocab_size(config.vocab_size)
    if head_width * heads != width:  # otherwise llama.cpp computes the head width itself
        writer.add_key_length(head_width)
        writer.add_value_length(head_width)


def _add_tensors(writer: Any, model: Any, number_format: GgufFormat, on_progress: Callable[[int, int], None]) -> None:
    """Quantize the tensors of a model, and add them to the GGUF file under their names in llama.cpp."""
    import gguf

    config = model.config
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = model.state_dict()
    total = len(tensors)
    if config.tie_word_embeddings:  # llama.cpp uses the input embeddings instead
        tensors.pop("lm_head.weight", None)
    for done, (key, tensor) in enumerate(tensors.items(), start=1):
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise BadSetting(f"the tensor '{key}' cannot be exported to GGUF. Use the gate without exporting it.")
        values = _permute_heads(key, tensor.detach().float().cpu().numpy(), config)
        dtype = _choose_tensor_format(values, number_format)
        writer.add_tensor(name, gguf.quantize(values, dtype), raw_dtype=dtype)
        on_progress(done, total)


def _choose_tensor_format(values: Any, number_format: GgufFormat) -> Any:
    """Return the number format of one tensor; vectors are small and stay float32."""
    import gguf

    if values.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    if number_format == "q8_0" and values.shape[-1] % Q8_BLOCK_SIZE == 0:
        return gguf.GGMLQuantizationType.Q8_0
    return gguf.GGMLQuantizationType.F16


def _permute_heads(key: str, values: Any, config: Any) -> Any:
    """Reorder Llama's query and key weights for llama.cpp: rows 0 1 2 3 become 0 2 1 3.

    `key` is the name of the weights, such as 'model.layers.0.self_attn.q_proj.weight'.
    """
    module = key.split(".")[-2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if config.model_type != "llama" or module not in heads:
        return values
    rows, *other_axes = values.shape
    halves = values.reshape(heads[module], 2, rows // heads[module] // 2, *other_axes)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def copy_tokenizer(writer: Any, file: Path) -> None:
    """Copy all tokenizer fields of an existing GGUF file to the file that `writer` writes."""
    import gguf

    for key, field in gguf.GGUFReader(file).fields.items():
        if key.startswith("tokenizer."):
            # `types` has one entry. For an array, the type of its items follows.
            item_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=item_type)


def write_tokenizer(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer of transformers to a GGUF file.

    Args:
        writer: The GGUF writer.
        tokenizer: A fast tokenizer of transformers.
        vocab_size: Number of rows of the model's embedding matrix. Rows without a token get padding tokens.

    Raises:
        BadSetting: llama.cpp cannot split text as this tokenizer does, so it would produce wrong tokens.
    """
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    pre_tokenizer = _find_pre_tokenizer(description)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    token_texts = {token_id: text for text, token_id in tokenizer.get_vocab().items()}
    _write_tokens(writer, token_texts, description["added_tokens"], vocab_size)
    writer.add_token_merges([" ".join(merge) for merge in description["model"]["merges"]])
    _write_special_tokens(writer, tokenizer)


def _write_tokens(
    writer: Any, texts: Mapping[int, str], added_tokens: Sequence[Mapping[str, Any]], vocab_size: int
) -> None:
    """Write the text and the type of each token id below `vocab_size`."""
    types = dict.fromkeys(texts, TOKEN_NORMAL)
    for added in added_tokens:
        types[added["id"]] = TOKEN_CONTROL if added["special"] else TOKEN_USER_DEFINED
    writer.add_token_list([texts.get(token_id, f"[PAD{token_id}]") for token_id in range(vocab_size)])
    writer.add_token_types([types.get(token_id, TOKEN_UNUSED) for token_id in range(vocab_size)])


def _write_special_tokens(writer: Any, tokenizer: Any) -> None:
    """Write the ids of special tokens, such as the end of text, and the chat template."""
    without_special = tokenizer.encode("a", add_special_tokens=False)
    writer.add_add_bos_token(len(tokenizer.encode("a")) > len(without_special))
    for kind in ("bos", "eos", "unk", "pad"):
        token_id = getattr(tokenizer, f"{kind}_token_id")
        if token_id is not None:
            getattr(writer, f"add_{kind}_token_id")(token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _find_pre_tokenizer(description: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the word splitting rules in a tokenizer.json, such as 'gpt-2'."""
    pre_tokenizer = description.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])  # a sequence of steps, or a single step
    kinds = [step.get("type") for step in steps]
    name = None
    if kinds == ["ByteLevel"]:
        name = "gpt-2"
    elif kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
        name = "smollm"
    elif kinds == ["Split", "ByteLevel"]:
        name = PRE_TOKENIZERS.get(steps[0]["pattern"].get("Regex"))
    if name is not None and description["model"]["type"] == "BPE":
        return name
    raise BadSetting(
        "the tokenizer of this base model cannot be exported to GGUF. llama.cpp does not support "
        f"{description['model']['type']} with {' and '.join(map(str, kinds)) or 'no word splitting'}. Fit the gate on a GGUF "
        "file of the same model instead: base='gguf:FILE'"
    )
