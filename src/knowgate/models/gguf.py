"""GGUF files through transformers: converted once to safetensors in the cache, so only the first start pays.

De-quantising 135M parameters takes some twenty seconds; loading the converted folder takes three.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.torch import save_file

from knowgate.core.files import atomic_folder, cache_dir, cached_sha256_file, file_lock, write_json
from knowgate.core.registry import split_spec
from knowgate.core.validation import expand_path
from knowgate.errors import BadSetting, MissingExtra, WeightsError
from knowgate.models import embedded_weights as weights
from knowgate.models.hf.loader import SOURCE_FILE, silence_transformers, translate_loading_errors
from knowgate.models.hf.model import HFModel

LOGGER = logging.getLogger("knowgate")
CONVERSION_VERSION = 1  # raise when the layout of converted folders changes


def open_gguf(file: str, label: str = "") -> HFModel:
    """The model in a GGUF file (`gguf:FILE`)."""
    return HFModel(str(convert_gguf(expand_path(file))), label or f"gguf:{file}")


def convert_gguf(file: Path) -> Path:
    """The folder with this file's weights as safetensors; made on first use."""
    if not file.is_file():
        raise WeightsError(f"there is no GGUF file '{file}'. Check the path; all kinds of models: knowgate models")
    sha256 = cached_sha256_file(file)
    target = cache_dir() / "converted" / f"{file.stem}-{sha256[:12]}-v{CONVERSION_VERSION}"
    if not (target / SOURCE_FILE).is_file():
        with file_lock(target.with_suffix(".lock")):
            if not (target / SOURCE_FILE).is_file():
                _convert(file, sha256, target)
    return target


def find_gguf_file(spec: str) -> Path | None:
    """The GGUF file that a model spec's weights come from; None where they come from elsewhere."""
    name, value = split_spec(spec)
    if name == "smollm":
        return weights.fetch_verified_file("smollm")
    return expand_path(value) if name == "gguf" else None


def _convert(file: Path, sha256: str, target: Path) -> None:
    try:
        import gguf  # noqa: F401 - transformers needs it and says so only in passing
    except ModuleNotFoundError:
        raise MissingExtra("a GGUF file", "local") from None
    LOGGER.info("converting %s once to safetensors ...", file.name)
    model, tokenizer = _dequantise(file)
    with atomic_folder(target) as partial:
        tokenizer.save_pretrained(partial)
        # save_pretrained refuses a GGUF-loaded model; the weights are plain tensors by now.
        del model.config.quantization_config
        model.config.save_pretrained(partial)
        model.generation_config.save_pretrained(partial)
        save_file(_tensors(model), partial / "model.safetensors", metadata={"format": "pt"})
        write_json(partial / SOURCE_FILE, {"sha256": sha256, "file": file.name, "format": CONVERSION_VERSION})


def _dequantise(file: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers' own bar for the conversion cannot be switched off, so it is caught
    with silence_transformers(), translate_loading_errors(str(file)), contextlib.redirect_stderr(io.StringIO()):
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


def open_smollm() -> HFModel:
    """The embedded model; fetched and converted on first use."""
    return open_gguf(str(weights.fetch_verified_file("smollm")), label="smollm")


TOKENIZER_KEY_PREFIX = "tokenizer."
TOKEN_CONTROL, TOKEN_USER_DEFINED, TOKEN_NORMAL, TOKEN_UNUSED = 3, 4, 1, 5  # kinds of tokens, as llama.cpp numbers them
WORD_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    WORD_SPLIT_PATTERN % "": "qwen2",
    WORD_SPLIT_PATTERN % "{1,3}": "llama-bpe",
}  # regular expression of the words -> llama.cpp's name


def copy_tokenizer(writer: Any, file: Path) -> None:
    """Everything that a GGUF file says of its tokenizer."""
    import gguf

    for key, field in gguf.GGUFReader(file).fields.items():
        if key.startswith(TOKENIZER_KEY_PREFIX):
            kinds = field.types
            writer.add_key_value(key, field.contents(), kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)


def write_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    """A fast tokenizer of transformers. size: of the model's vocabulary, which may have more rows than it has words."""
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    cut = _cut(told)
    words = {number: word for word, number in tokenizer.get_vocab().items()}
    added = {item["id"]: TOKEN_CONTROL if item["special"] else TOKEN_USER_DEFINED for item in told["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list([words.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types(
        [added.get(number, TOKEN_NORMAL if number in words else TOKEN_UNUSED) for number in range(size)]
    )
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in told["model"]["merges"]])
    _special(writer, tokenizer)


def _special(writer: Any, tokenizer: Any) -> None:
    bare = tokenizer.encode("a", add_special_tokens=False)
    writer.add_add_bos_token(len(tokenizer.encode("a")) > len(bare))
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if number is not None:
            add(number)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _cut(told: Mapping[str, Any]) -> str:
    """llama.cpp's name for how this tokenizer cuts a text into words."""
    outer = told.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", [outer])
    kinds = [step.get("type") for step in steps]
    if told["model"]["type"] == "BPE" and kinds and kinds[-1] == "ByteLevel":
        if kinds == ["ByteLevel"]:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and (found := PRE_TOKENIZERS.get(steps[0]["pattern"].get("Regex", ""))):
            return found
    raise BadSetting(
        f"the tokenizer of this base ({told['model']['type']}, {' then '.join(map(str, kinds)) or 'no cut'}) cannot be "
        "written as GGUF. Fit the judge on the same base as a GGUF file: --base gguf:FILE"
    )


GgufFormat = Literal["q8_0", "f16"]
EXPORTABLE_ARCHITECTURES = ("llama", "qwen2")
Q8_BLOCK_SIZE = 32  # values that share a scale in q8_0


def check_exportable(config: Any) -> None:
    """Refuse what would be written wrongly."""
    if config.model_type not in EXPORTABLE_ARCHITECTURES:
        raise BadSetting(
            f"a base of the kind '{config.model_type}' cannot be written as GGUF here; these can: "
            f"{', '.join(EXPORTABLE_ARCHITECTURES)}. Use the gate as it is, or fit one on such a base."
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
    kind: GgufFormat,
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
    check_exportable(model.config)
    writer = gguf.GGUFWriter(file, model.config.model_type)
    writer.add_type("model")
    writer.add_name(file.stem)
    _shape(writer, model.config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind == "q8_0" else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if tokens_of is None:
        write_tokenizer(writer, tokenizer, model.config.vocab_size)
    else:
        copy_tokenizer(writer, tokens_of)
    total = len(model.state_dict())
    for done, (each, values, form) in enumerate(_gguf_writing_tensors(model, kind)):
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


def _gguf_writing_tensors(model: Any, kind: GgufFormat) -> Iterator[tuple[str, Any, Any]]:
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


def _form(values: Any, kind: GgufFormat) -> Any:
    """Norms and biases stay as they are; rows that make no whole blocks are halved only."""
    import gguf

    if values.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    eighth = kind == "q8_0" and values.shape[-1] % Q8_BLOCK_SIZE == 0
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
