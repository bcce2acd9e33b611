"""The C interface of llama.cpp, as the package xllamacpp exports it on Linux and macOS. Knows memory layouts; no model.

Settings travel as whole structures whose layout changes between releases of llama.cpp. So the defaults that the library
itself gives are compared with those known here before any of them is used: a release that lays them out otherwise is
refused, not run.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from knowgate.errors import MissingExtra, NotOffered

LOGGER = logging.getLogger(__name__)
TESTED_RELEASE = "2026.10"  # of xllamacpp
# n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs_max, n_outputs_max_per_seq, n_threads, n_threads_batch
DEFAULT_FIRST_FIELDS = (512, 2048, 512, 1, 0, 0, 1, 4, 4)
OUTPUTS_PER_SEQUENCE_OFFSET, CALLBACK_OFFSET, CACHE_TYPES_OFFSET = (
    24,
    88,
    104,
)  # offsets in bytes: of n_outputs_max_per_seq, cb_eval and type_k
# embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified, one byte each, after type_k and some pointers
DEFAULT_SWITCHES, KV_UNIFIED_INDEX = bytes((0, 1, 1, 1, 1, 0)), 5
LOG_LEVEL_ERROR, LOG_LEVEL_CONTINUED = 4, 5  # levels of its log
EVAL_CALLBACK_TYPE = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
LOG_CALLBACK_TYPE = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)


class OpaqueParams(ctypes.Structure):
    """Larger than any settings of llama.cpp: what is beyond its own is not looked at, by registers or by stack."""

    _fields_ = (("bytes", ctypes.c_uint8 * 512),)


class LlamaBatch(ctypes.Structure):
    """`llama_batch`: tokens with their positions, rows and whether their logits are wanted."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


FUNCTION_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_context_default_params": (OpaqueParams, ()),
    "llama_model_default_params": (OpaqueParams, ()),
    "llama_log_set": (None, (LOG_CALLBACK_TYPE, c_void_p)),
    "llama_backend_init": (None, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, OpaqueParams)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_init_from_model": (c_void_p, (c_void_p, OpaqueParams)),
    "llama_free": (None, (c_void_p,)),
    "llama_set_n_threads": (None, (c_void_p, c_int32, c_int32)),
    "llama_n_ctx": (c_uint32, (c_void_p,)),
    "llama_n_ctx_seq": (c_uint32, (c_void_p,)),
    "llama_n_batch": (c_uint32, (c_void_p,)),
    "llama_n_ubatch": (c_uint32, (c_void_p,)),
    "llama_n_seq_max": (c_uint32, (c_void_p,)),
    "llama_model_n_ctx_train": (c_int32, (c_void_p,)),
    "llama_model_n_embd": (c_int32, (c_void_p,)),
    "llama_model_n_layer": (c_int32, (c_void_p,)),
    "llama_model_has_encoder": (c_bool, (c_void_p,)),
    "llama_model_is_recurrent": (c_bool, (c_void_p,)),
    "llama_model_is_hybrid": (c_bool, (c_void_p,)),
    "llama_model_chat_template": (c_char_p, (c_void_p, c_char_p)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_vocab_bos": (c_int32, (c_void_p,)),
    "llama_vocab_eos": (c_int32, (c_void_p,)),
    "llama_vocab_get_text": (c_char_p, (c_void_p, c_int32)),
    "llama_vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "llama_vocab_is_control": (c_bool, (c_void_p, c_int32)),
    "llama_tokenize": (c_int32, (c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool)),
    "llama_detokenize": (c_int32, (c_void_p, POINTER(c_int32), c_int32, c_char_p, c_int32, c_bool, c_bool)),
    "llama_batch_init": (LlamaBatch, (c_int32, c_int32, c_int32)),
    "llama_batch_free": (None, (LlamaBatch,)),
    "llama_decode": (c_int32, (c_void_p, LlamaBatch)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "ggml_get_name": (c_char_p, (c_void_p,)),
    "ggml_nelements": (ctypes.c_int64, (c_void_p,)),
    "ggml_nbytes": (c_size_t, (c_void_p,)),
    "ggml_backend_tensor_get": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
}


@functools.cache
def load_library() -> Any:
    """The functions of llama.cpp, found to be laid out as they are known here."""
    loaded = ctypes.CDLL(str(_file()))
    for name, (result, arguments) in FUNCTION_SIGNATURES.items():
        try:
            function = getattr(loaded, name)
        except AttributeError:
            raise _other(f"it has no {name}") from None
        function.restype, function.argtypes = result, arguments
    check_params_layout(bytes(loaded.llama_context_default_params().bytes))
    loaded.llama_log_set(log_callback, None)
    loaded.llama_backend_init()
    return loaded


def _file() -> Path:
    try:
        import xllamacpp
    except ModuleNotFoundError:
        raise MissingExtra("llamacpp:FILE.gguf", "llamacpp") from None
    found = [*Path(str(xllamacpp.__file__)).parent.glob("*.so")]
    if not found:  # on Windows, nothing is exported
        raise _other("its library exports no functions on this system")
    return found[0]


def check_params_layout(defaults: bytes) -> int:
    """Where `kv_unified` is; an error unless all defaults are where they are expected."""
    place = defaults.find(DEFAULT_SWITCHES, CACHE_TYPES_OFFSET + 8)
    known = struct.unpack_from("<9i", defaults) == DEFAULT_FIRST_FIELDS and struct.unpack_from(
        "<2i", defaults, CACHE_TYPES_OFFSET
    ) == (1, 1)
    empty = not any(defaults[CALLBACK_OFFSET : CALLBACK_OFFSET + 16])
    if not (
        known
        and empty
        and CACHE_TYPES_OFFSET + 8 <= place <= CACHE_TYPES_OFFSET + 64
        and not any(defaults[CACHE_TYPES_OFFSET + 8 : place])
    ):
        raise _other("its settings are laid out in another way")
    return place + KV_UNIFIED_INDEX


def _other(problem: str) -> NotOffered:
    return NotOffered(
        f"this release of xllamacpp cannot be run in-process: {problem}. Install one of {TESTED_RELEASE} (pip install "
        f"'xllamacpp>={TESTED_RELEASE},<{TESTED_RELEASE}.99999'), or use gguf:FILE."
    )


logged_errors: list[str] = []  # what llama.cpp complained of since the list was emptied


def _hear(level: int, text: bytes, _: Any) -> None:
    """Its log: complaints are kept, so that an error can say why; the rest is for nobody."""
    if level == LOG_LEVEL_ERROR:
        logged_errors.append(text.decode(errors="replace").strip())


log_callback = LOG_CALLBACK_TYPE(_hear)  # kept: llama.cpp holds a pointer to it
