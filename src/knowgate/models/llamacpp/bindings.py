"""ctypes bindings for the llama.cpp library in the package xllamacpp, on Linux and macOS.

llama.cpp takes parameters as C structures whose layout changes between releases. So the defaults that the library
returns are first compared with the expected ones. A release with a different layout is refused with an error.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from knowgate.errors import UnsupportedSignal, require_extra

TESTED_RELEASE = "2026.10"  # of xllamacpp
# Defaults of n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs_max, n_outputs_max_per_seq, n_threads and
# n_threads_batch, the first fields of llama_context_params.
DEFAULT_FIRST_FIELDS = (512, 2048, 512, 1, 0, 0, 1, 4, 4)
# Offsets in bytes of n_outputs_max_per_seq, cb_eval and type_k.
OUTPUTS_PER_SEQUENCE_OFFSET, CALLBACK_OFFSET, CACHE_TYPES_OFFSET = 24, 88, 104
# Defaults of embeddings, offload_kqv, no_perf, op_offload, swa_full and kv_unified, one byte each. They follow type_k,
# type_v and some pointers.
DEFAULT_SWITCHES, KV_UNIFIED_INDEX = bytes((0, 1, 1, 1, 1, 0)), 5
MAX_POINTER_BYTES = 56  # seven pointers of 8 bytes
LOG_LEVEL_ERROR = 4
EVAL_CALLBACK_TYPE = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
LOG_CALLBACK_TYPE = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)


class OpaqueParams(ctypes.Structure):
    """A parameter structure of llama.cpp as raw bytes.

    512 bytes are more than the real structures need.
    """

    _fields_ = (("bytes", ctypes.c_uint8 * 512),)


class LlamaBatch(ctypes.Structure):
    """`llama_batch`: tokens with their positions and sequences, and whether their logits are needed."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


# Result type, argument types, and the functions with this signature.
FUNCTION_SIGNATURES: list[tuple[Any, tuple[Any, ...], str]] = [
    (OpaqueParams, (), "llama_context_default_params llama_model_default_params"),
    (None, (), "llama_backend_init"),
    (None, (LOG_CALLBACK_TYPE, c_void_p), "llama_log_set"),
    (c_void_p, (c_char_p, OpaqueParams), "llama_model_load_from_file"),
    (c_void_p, (c_void_p, OpaqueParams), "llama_init_from_model"),
    (c_void_p, (c_void_p,), "llama_model_get_vocab llama_get_memory"),
    (None, (c_void_p, c_int32, c_int32), "llama_set_n_threads"),
    (c_uint32, (c_void_p,), "llama_n_ctx llama_n_ctx_seq llama_n_batch llama_n_seq_max"),
    (c_int32, (c_void_p,), "llama_model_n_ctx_train llama_model_n_embd llama_model_n_layer"),
    (c_int32, (c_void_p,), "llama_vocab_n_tokens llama_vocab_bos llama_vocab_eos"),
    (c_bool, (c_void_p,), "llama_model_has_encoder llama_model_is_recurrent"),
    (c_char_p, (c_void_p, c_char_p), "llama_model_chat_template"),
    (c_char_p, (c_void_p, c_int32), "llama_vocab_get_text"),
    (c_bool, (c_void_p, c_int32), "llama_vocab_is_eog llama_vocab_is_control"),
    (c_int32, (c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool), "llama_tokenize"),
    (c_int32, (c_void_p, POINTER(c_int32), c_int32, c_char_p, c_int32, c_bool, c_bool), "llama_detokenize"),
    (LlamaBatch, (c_int32, c_int32, c_int32), "llama_batch_init"),
    (c_int32, (c_void_p, LlamaBatch), "llama_decode"),
    (POINTER(c_float), (c_void_p, c_int32), "llama_get_logits_ith"),
    (None, (c_void_p, c_bool), "llama_memory_clear"),
    (c_bool, (c_void_p, c_int32, c_int32, c_int32), "llama_memory_seq_rm"),
    (None, (c_void_p, c_int32, c_int32, c_int32, c_int32), "llama_memory_seq_cp"),
    (c_char_p, (c_void_p,), "ggml_get_name"),
    (c_int64, (c_void_p,), "ggml_nelements"),
    (c_size_t, (c_void_p,), "ggml_nbytes"),
    (None, (c_void_p, c_void_p, c_size_t, c_size_t), "ggml_backend_tensor_get"),
]

logged_errors: list[str] = []  # error messages of llama.cpp since the list was last cleared


def _log(level: int, text: bytes, _: Any) -> None:
    """Collect the errors that llama.cpp logs, and ignore the rest."""
    if level == LOG_LEVEL_ERROR:
        logged_errors.append(text.decode(errors="replace").strip())


log_callback = LOG_CALLBACK_TYPE(_log)  # must stay alive: llama.cpp keeps a pointer to it


@functools.cache
def load_library() -> Any:
    """Load llama.cpp, declare its functions and check the layout of its parameters.

    Raises:
        MissingExtra: xllamacpp is not installed.
        UnsupportedSignal: This release of xllamacpp, or this operating system, is not supported.
    """
    library = ctypes.CDLL(str(_find_library_file()))
    for result, arguments, names in FUNCTION_SIGNATURES:
        for name in names.split():
            if not hasattr(library, name):
                raise _make_unsupported_error(f"the function {name} is missing")
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    check_params_layout(bytes(library.llama_context_default_params().bytes))
    library.llama_log_set(log_callback, None)
    library.llama_backend_init()
    return library


def _find_library_file() -> Path:
    """Return the shared library inside the xllamacpp package."""
    with require_extra("llamacpp:FILE.gguf", "llamacpp"):
        import xllamacpp
    files = [*Path(str(xllamacpp.__file__)).parent.glob("*.so")]
    if not files:  # on Windows, the library is a .pyd file, which exports none of llama.cpp's functions
        raise _make_unsupported_error("the library exports no functions on this system")
    return files[0]


def check_params_layout(defaults: bytes) -> int:
    """Check the layout of llama.cpp's context parameters, and return the offset of `kv_unified`.

    The layout differs between releases.

    Args:
        defaults: The default parameters of the library, as bytes.

    Raises:
        UnsupportedSignal: A default value is not at the expected offset, so the layout is different.
    """
    has_fields = struct.unpack_from("<9i", defaults) == DEFAULT_FIRST_FIELDS
    # The callback and its argument are null pointers of 8 bytes each.
    has_null_callback = not any(defaults[CALLBACK_OFFSET : CALLBACK_OFFSET + 16])
    # The types of the cached keys and values are both 1 (float16).
    has_types = struct.unpack_from("<2i", defaults, CACHE_TYPES_OFFSET) == (1, 1)
    # After the types come null pointers, and then the switches, among them kv_unified.
    fields_after_types = defaults[CACHE_TYPES_OFFSET + 8 :]
    pointers, switches, _ = fields_after_types.partition(DEFAULT_SWITCHES)
    has_switches = bool(switches) and len(pointers) <= MAX_POINTER_BYTES and not any(pointers)
    if not (has_fields and has_null_callback and has_types and has_switches):
        raise _make_unsupported_error("the layout of llama.cpp's parameters is unknown")
    return CACHE_TYPES_OFFSET + 8 + len(pointers) + KV_UNIFIED_INDEX


def _make_unsupported_error(problem: str) -> UnsupportedSignal:
    """Return the error for a release of xllamacpp that cannot be used."""
    return UnsupportedSignal(
        f"this release of xllamacpp cannot be run in-process: {problem}. Install release {TESTED_RELEASE} (pip install "
        f"'xllamacpp>={TESTED_RELEASE},<{TESTED_RELEASE}.99999'), or use gguf:FILE."
    )
